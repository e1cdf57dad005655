"""How little a step of an RL trainer changes, and what it costs to find, send and apply that instead of a version.

    python -m benchmarks.update.delta

The model is a layer of Qwen3-1.7B, with as much of an embedding and a head that a quarter of the stored bytes is BF16,
as of Qwen3-8B. Weights are N(0, 0.02²). The trainer is AdamW with torch's defaults at lr 1e-6 on fp32 masters. A
gradient is noise that is new at each step plus a field that stays, 1 to 5 in standard deviations: of RL's gradients the
larger part is noise. Adam divides by their size, so what counts is only how much of them persists. The embedding has
gradients in the rows of the tokens of a batch, of which each step draws a fifth.

Compared are the versions before and after one step, and after 16 more steps, as they are stored: FP8 codes, their
scales, BF16. ``entropy_bytes``: what a code could reach that knows how many elements change in each tensor, and how
often by how much. Comparing (with hashing and encoding) and applying are timed beside a plain copy of the same bytes on
as many threads; and a push of a delta beside one of all that the trainer has quantized, into the real ingest in a
process of its own.
"""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.update.upload_servers import process, serve_ingest
from rollout_service.client import RolloutClient
from rollout_service.client._sent_weights import Changes, SentWeights
from rollout_service.client._tensors import describe
from rollout_service.model.convert import Converter, tensor_bytes
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.threads import in_threads, io_threads

LEARNING_RATE = 1e-6
PERSISTENT, NOISE = 1.0, 5.0
"""Standard deviations of what a gradient is the sum of."""
ROWS_IN_A_BATCH = 0.2
"""Share of the embedding's rows that have a gradient in one step."""
EMBEDDING = "model.embed_tokens.weight"
STEPS = ((0, 1), (9, 10), (99, 100), (84, 100))
"""Versions that are compared: after so many steps. In its first step Adam moves every weight by the learning rate."""
TIMED = (99, 100)
REPEATS = 5

Tensors = dict[str, torch.Tensor]
Bits = npt.NDArray[Any]


def make_model(folder: Path) -> Tensors:
    """Save it, and return its weights as fp32."""
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
    torch.manual_seed(0)
    weights = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape).mul_(0.02)
        for name, shape in ServedModel.load(folder).shapes.items()
    }
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")
    return weights


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
    """What is compared, as it is stored."""
    wanted, converter = {step for pair in STEPS for step in pair}, Converter(recipe, device="cpu")
    stepped = itertools.islice(trained(weights), max(wanted))
    return {
        step: {name: tensor.clone() for name, tensor in converter.convert(after.items())}
        for step, after in enumerate(itertools.chain([weights], stepped))
        if step in wanted
    }


# --- how much changes


def sent(version: Tensors) -> SentWeights:
    """A client's memory after it has sent that version."""
    weights = SentWeights(tuple(describe(name, tensor) for name, tensor in version.items()))
    for _ in weights.take(version.items()):
        pass
    return weights


def bits_of(tensor: torch.Tensor) -> Bits:
    """The elements as unsigned integers."""
    return np.frombuffer(tensor_bytes(tensor), f"<u{tensor.element_size()}")


def entropy_bytes(old: Bits, new: Bits) -> float:
    """Of independent changes: which elements, and by how much."""
    differences = (new - old)[old != new]
    if not differences.size:
        return 0.0
    shares = np.array([differences.size / old.size, 1 - differences.size / old.size])
    which = old.size * -sum(share * np.log2(share) for share in shares if share)
    counts = np.unique(differences, return_counts=True)[1] / differences.size
    return float(which - differences.size * (counts * np.log2(counts)).sum()) / 8


def compared(steps: tuple[int, int], old: Tensors, new: Tensors) -> results.Json:
    """Shares of elements and bytes that change."""
    changes = sent(old).changes_to(new.items())
    assert changes is not None, "more changes than are sent as a delta"
    elements, changed, encoded, stored = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    ideal = 0.0
    for (name, tensor), change in zip(new.items(), changes, strict=True):
        kind, before, after = str(tensor.dtype).removeprefix("torch."), bits_of(old[name]), bits_of(tensor)
        elements[kind] += after.size
        changed[kind] += int(np.count_nonzero(before != after))
        encoded[kind] += len(change.encoded) if change is not None else 0
        stored[kind] += after.nbytes
        ideal += entropy_bytes(before, after)
    return {
        "steps": list(steps),
        "changed_share": {kind: changed[kind] / elements[kind] for kind in elements},
        "encoded_bytes": dict(encoded),
        "stored_bytes": dict(stored),
        "encoded_share": encoded.total() / stored.total(),
        "entropy_bytes": ideal,
    }


# --- how long it takes


def seconds_of(work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> list[float]:
    """Of each repeat, after one that is not counted."""
    taken = []
    for _ in range(REPEATS + 1):
        prepare()
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken[1:]


def timed(old: Tensors, new: Tensors) -> results.Json:
    """Comparing and applying on ``io_threads``, and copying as many bytes."""
    base, target = sent(old), [np.empty_like(bits_of(tensor)) for tensor in new.values()]
    found: list[Changes] = []

    def compare() -> None:
        changes = base.changes_to(new.items())
        assert changes is not None
        found.append(changes)

    def copy() -> None:
        pairs = zip(target, new.values(), strict=True)
        list(in_threads(lambda pair: np.copyto(pair[0], bits_of(pair[1])), pairs))

    def become_old() -> None:
        for _ in base.take(old.items()):
            pass

    return {
        "threads": io_threads(),
        "nbytes": base.nbytes,
        "copy_s": seconds_of(copy),
        "compare_s": seconds_of(compare),
        "apply_s": seconds_of(lambda: base.change(found[0]), become_old),
    }


async def pushed(folder: Path, old: Tensors, new: Tensors) -> results.Json:
    """Both versions in turn: all bytes of one, then what changes to the other; seconds until each is committed."""
    whole_s, delta_s = list[float](), list[float]()
    with process(serve_ingest, folder) as (url, _):
        async with RolloutClient(url) as client:
            await client.push_weights("next", old, transport="delta", wait="none")
            for weights in [new, old] * REPEATS:
                started = time.perf_counter()
                by_delta = await client.push_weights("next", weights, transport="delta", wait="none")
                delta_s.append(time.perf_counter() - started)
                started = time.perf_counter()
                whole = await client.push_weights("next", weights, quantize="trainer", wait="none")
                whole_s.append(time.perf_counter() - started)
                assert by_delta.digest == whole.digest
    return {"whole_s": whole_s, "delta_s": delta_s}


# --- what is said of it


def speeds(times: results.Json) -> dict[str, tuple[float, float]]:
    """GB/s of stored bytes, and that as a share of a copy's."""
    copy_s = statistics.median(times["copy_s"])
    taken = {name: statistics.median(times[f"{name}_s"]) for name in ("copy", "compare", "apply")}
    return {name: (times["nbytes"] / seconds / 1e9, copy_s / seconds) for name, seconds in taken.items()}


def table_of(cases: list[results.Json]) -> Table:
    """For people."""
    table = Table(title="changed between two versions")
    for column in ("after steps", "codes", "scales", "BF16", "sent of all bytes", "of the entropy"):
        table.add_column(column, justify="right")
    for case in cases:
        shares = [f"{case['changed_share'][kind]:.2%}" for kind in ("float8_e4m3fn", "float32", "bfloat16")]
        of_entropy = sum(case["encoded_bytes"].values()) / case["entropy_bytes"]
        table.add_row(" → ".join(map(str, case["steps"])), *shares, f"{case['encoded_share']:.2%}", f"{of_entropy:.2f}")
    return table


def main() -> None:
    """Measure, print, and write benchmarks/results/<machine>/update_delta.json."""
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = make_model(folder / "model")
        served = ServedModel.load(folder / "model")
        quantized = tuple(name for name in served.stored if name.endswith("_proj.weight"))
        console.log(f"{sum(weight.numel() for weight in weights.values()) / 1e6:.0f} M weights")
        stored = versions(weights, TrainerRecipe(weights="fp8_block", quantized=quantized))
        console.log(f"trained for {max(stored)} steps")
        cases = [compared((old, new), stored[old], stored[new]) for old, new in STEPS]
        console.print(table_of(cases))
        old, new = TIMED
        times = timed(stored[old], stored[new])
        for what, (gb_s, of_copy) in speeds(times).items():
            console.print(f"{what}: {gb_s:.2f} GB/s, {of_copy:.2f} of a copy's")
        pushes = asyncio.run(pushed(folder, stored[old], stored[new]))
    whole, delta = (statistics.median(pushes[name]) for name in ("whole_s", "delta_s"))
    console.print(f"a push of all {whole:.2f} s, of a delta {delta:.2f} s")
    assumed = {"lr": LEARNING_RATE, "gradient": {"persistent": PERSISTENT, "noise": NOISE}, "rows": ROWS_IN_A_BATCH}
    content = {"assumed": assumed, "cases": cases, "times": times, "pushes": pushes}
    console.print(f"wrote {results.write('update_delta', content)}")


if __name__ == "__main__":
    run(main)
