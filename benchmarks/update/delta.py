"""How little a step of an RL trainer changes, and the bytes that a delta sends instead of a version.

    python -m benchmarks.update.delta

The model is a layer of Qwen3-1.7B, with as much of an embedding and a head that a quarter of the stored bytes is BF16,
as of Qwen3-8B. Weights are N(0, 0.02²). The trainer is AdamW with torch's defaults at lr 1e-6 on fp32 masters. A
gradient is noise that is new at each step plus a field that stays, 1 to 5 in standard deviations: of RL's gradients the
larger part is noise. Adam divides by their size, so what counts is only how much of them persists. The embedding has
gradients in the rows of the tokens of a batch, of which each step draws a fifth.

Compared are the versions before and after one step, and after 16 more steps, as they are stored: FP8 codes, their
scales, BF16.
"""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.common import results
from benchmarks.common.command import run
from rollout_service.client._sent_weights import SentWeights
from rollout_service.client._tensors import describe
from rollout_service.model.convert import Converter
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import TrainerRecipe

LEARNING_RATE = 1e-6
PERSISTENT, NOISE = 1.0, 5.0  # standard deviations of what a gradient is the sum of
ROWS_IN_A_BATCH = 0.2  # share of the embedding's rows that have a gradient in one step
LAYER = "model.layers.0."
EMBEDDING = "model.embed_tokens.weight"
STEPS = ((0, 1), (9, 10), (99, 100), (84, 100))
"""Versions that are compared: after so many steps. In its first step Adam moves every weight by the learning rate."""

Tensors = dict[str, torch.Tensor]


def make_model(folder: Path) -> dict[str, tuple[int, ...]]:
    """Save its configuration, and return the shapes of its weights."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=2048,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    return dict(ServedModel.load(folder).shapes)


def initial(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Weights as fp32."""
    torch.manual_seed(0)
    return {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape).mul_(0.02)
        for name, shape in shapes.items()
    }


def trained(weights: Tensors) -> Iterator[Tensors]:
    """The same tensors after each step."""
    parameters = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE, fused=True)
    persistent = {name: torch.randn_like(weight).mul_(PERSISTENT) for name, weight in weights.items()}
    for parameter in parameters.values():
        parameter.grad = torch.empty_like(parameter)
    while True:
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            parameter.grad.normal_(0, NOISE).add_(persistent[name]).mul_(1e-4)
            if name == EMBEDDING:
                parameter.grad.mul_(torch.rand(parameter.shape[0], 1) < ROWS_IN_A_BATCH)
        optimizer.step()
        yield {name: parameter.detach() for name, parameter in parameters.items()}


def versions(weights: Tensors, recipe: TrainerRecipe) -> dict[int, Tensors]:
    wanted, converter = {step for pair in STEPS for step in pair}, Converter(recipe, device="cpu")
    stepped = itertools.islice(trained(weights), max(wanted))
    return {
        step: {name: tensor.clone() for name, tensor in converter.convert(after.items())}
        for step, after in enumerate(itertools.chain([weights], stepped))
        if step in wanted
    }


def sent(version: Tensors) -> SentWeights:
    """A client's memory after it has sent that version."""
    weights = SentWeights(tuple(describe(name, tensor) for name, tensor in version.items()))
    for _ in weights.take(version.items()):
        pass
    return weights


def compared(steps: tuple[int, int], old: Tensors, new: Tensors) -> results.Json:
    """Return the bytes that a delta sends, and those of the whole version."""
    changes = sent(old).changes_to(new.items())
    assert changes is not None, "more changes than are sent as a delta"
    encoded = sum(len(change.encoded) for change in changes if change is not None)
    stored = sum(tensor.nbytes for tensor in new.values())
    return {
        "steps": list(steps),
        "encoded_bytes": encoded,
        "stored_bytes": stored,
        "encoded_share": encoded / stored,
    }


def main() -> None:
    """Measure, print, and write benchmarks/results/<machine>/update_delta.json."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        weights = initial(make_model(Path(folder)))
    quantized = tuple(name for name in weights if name.startswith(LAYER) and name.endswith("_proj.weight"))
    console.log(f"{sum(weight.numel() for weight in weights.values()) / 1e6:.0f} M weights")
    stored = versions(weights, TrainerRecipe(weights="fp8_block", quantized=quantized))
    console.log(f"trained for {max(stored)} steps")
    cases = [compared((old, new), stored[old], stored[new]) for old, new in STEPS]
    for case in cases:
        console.print(case)
    assumed = {"lr": LEARNING_RATE, "gradient": {"persistent": PERSISTENT, "noise": NOISE}, "rows": ROWS_IN_A_BATCH}
    console.print(f"wrote {results.write('update_delta', {'assumed': assumed, 'cases': cases})}")


if __name__ == "__main__":
    run(main)
