"""Where a trainer's numbers leave an engine's: step by step through the layers of a small Qwen3.

    python -m benchmarks.mismatch.layers [--engine fp8_block --engine bf16]

An engine samples a completion, and then reads prompt and completion at once. Of every step of its forward pass three
shares of unequal BF16 numbers are written:

- ``step``: by the trainer's own step, given the engine's input; so the step that computes otherwise shows by itself.
  Of attention there are two more ways, which no trainer has;
- ``so far``: in the trainer's forward pass over the same tokens, with all that came before;
- ``engine``: between what the engine made of these tokens one by one and all at once: its own, which no trainer avoids.

Trainers are those of ``benchmarks.mismatch.logprobs``; ``fake_quant`` for an engine in FP8, else ``engine_roundings``.
"""

import asyncio
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine, commit, load_version
from benchmarks.mismatch.layer_recorder import LayerRecorder, Recorded
from benchmarks.mismatch.logprobs import (
    DEVICE,
    GPU,
    KV_CACHE_BYTES,
    PROMPT_SEED,
    Engine,
    Model,
    SampleOptions,
    config_of,
    make,
    recipe_of,
)
from benchmarks.mismatch.repeating import PERIOD, repeating
from rollout_service.config import ServiceConfig
from rollout_service.protocol.sampling import Sampling
from rollout_service.quant.engine_roundings import Kernels, engine_roundings
from rollout_service.quant.fake_quant import Products, fake_quant
from rollout_service.store.log import WeightLog

RESULT = "mismatch_layers"
SAME = ("engine", "products", "layer", "step")


PRODUCTS: tuple[Products, ...] = ("fp8", "fp32") if GPU else ("fp32",)
"""Of ``fake_quant``."""


class LayerOptions(Options):
    """Engines and samples."""

    engine: tuple[Engine, ...] = (Engine.BF16, Engine.FP8)
    """Those of ``benchmarks.mismatch.logprobs`` that are not compiled; may be repeated."""
    steps: int = 300
    """Of training."""
    tokens: int = 48
    """Sampled."""


@dataclass(frozen=True)
class Case:
    """One step of one layer. Shares of unequal numbers; None where it is not measured."""

    engine: str
    products: str
    """Of the trainer; empty where nothing is quantized."""
    layer: int
    step: str
    step_unlike: float | None
    """Of the trainer's step with the engine's input."""
    so_far_unlike: float | None
    """Of the trainer's forward pass."""
    engine_unlike: float
    """Of the engine, token by token, from itself, all at once."""


def record(config: ServiceConfig, options: LayerOptions, folder: Path) -> tuple[list[int], Recorded, Recorded]:
    """Tokens, and what the engine made of all but the last: one by one after the prompt, and all at once."""

    async def recorded() -> list[int]:
        await commit(config)
        arguments: dict[str, object] = {
            "worker_extension_cls": f"{LayerRecorder.__module__}.{LayerRecorder.__qualname__}",
            "enable_prefix_caching": False,
        }
        environment = {"VLLM_DEEP_GEMM_WARMUP": "skip"}
        if GPU:  # which this process has used
            environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
            arguments["kv_cache_memory_bytes"] = KV_CACHE_BYTES
        prompt = repeating(1, PROMPT_SEED, tokens=PERIOD + 4)[0].tolist()
        async with bare_engine(config, environment=environment, arguments=arguments) as engine:
            await load_version(engine, WeightLog(config.weights.root).folder(0), 0)
            await engine.ask_workers("record_layers")
            sampling = Sampling(max_tokens=options.tokens, ignore_eos=True)
            [completion] = await engine.generate("one by one", tuple(prompt), sampling)
            await engine.ask_workers("save_layers", str(folder / "one-by-one.pt"))
            tokens = [*prompt, *completion.token_ids]
            await engine.ask_workers("record_layers")
            await engine.generate("at once", tuple(tokens[:-1]), Sampling(max_tokens=1))
            await engine.ask_workers("save_layers", str(folder / "at-once.pt"))
        return tokens

    tokens = asyncio.run(recorded())
    by_one, at_once = (torch.load(folder / f"{name}.pt") for name in ("one-by-one", "at-once"))
    return tokens[:-1], by_one, at_once


class Steps:
    """The steps of a trainer's Qwen3, each from the engine's input."""

    def __init__(self, model: Any, kernels: Kernels) -> None:
        self._model, self._kernels = model, kernels
        config = model.config
        self._heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)

    def of_layer(self, index: int) -> dict[str, tuple[str, Callable[..., torch.Tensor]]]:
        """Step → the engine's module whose output it is to have, and what computes it from that one's inputs."""
        layer, last = self._model.model.layers[index], len(self._model.model.layers) - 1
        attention, mlp, prefix = layer.self_attn, layer.mlp, f"model.layers.{index}"
        steps: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
            "input_layernorm": (f"{prefix}.input_layernorm", _summed(layer.input_layernorm)),
            "qkv_proj": (
                f"{prefix}.self_attn.qkv_proj",
                lambda x: torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], -1),
            ),
            "q_norm": (f"{prefix}.self_attn.q_norm", attention.q_norm),
            "k_norm": (f"{prefix}.self_attn.k_norm", attention.k_norm),
            "attention": (f"{prefix}.self_attn.attn", self.attention),
            "attention in fp32": (f"{prefix}.self_attn.attn", self.attention_in_fp32),
            "attention, weights in BF16": (f"{prefix}.self_attn.attn", self.attention_of_one_block),
            "o_proj": (f"{prefix}.self_attn.o_proj", attention.o_proj),
            "post_attention_layernorm": (
                f"{prefix}.post_attention_layernorm",
                _summed(layer.post_attention_layernorm),
            ),
            "gate_up_proj": (
                f"{prefix}.mlp.gate_up_proj",
                lambda x: torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], -1),
            ),
            "act_fn": (f"{prefix}.mlp.act_fn", lambda x: mlp.act_fn(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
            "down_proj": (f"{prefix}.mlp.down_proj", mlp.down_proj),
        }
        return steps | ({"norm": ("model.norm", _summed(self._model.model.norm))} if index == last else {})

    def rotated(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalized queries and keys [tokens, heads, dim], by their positions; [tokens, heads · dim]."""
        positions = torch.arange(len(query), device=query.device)[None]
        cos, sin = self._model.model.rotary_emb(query, positions)
        turned = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
        query, key = (each[0].transpose(0, 1).flatten(1).to(torch.bfloat16) for each in turned)
        return query, key

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal, of one sequence, by torch's kernel, transformers' default; as ``engine_roundings`` has it."""
        query, key, value = self._by_heads(query, key, value)
        if self._kernels == "cpu":
            query, key, value = query.float(), key.float(), value.float()
        made = scaled_dot_product_attention(query, key, value, is_causal=True)
        return made[0].transpose(0, 1).flatten(1).to(torch.bfloat16)

    def attention_in_fp32(self, *parts: torch.Tensor) -> torch.Tensor:
        """From rounded queries, keys and values to a rounded result, nothing rounded between."""
        query, key, value = (part.float() for part in self._by_heads(*parts))
        made = scaled_dot_product_attention(query, key, value, is_causal=True)
        return made[0].transpose(0, 1).flatten(1).to(torch.bfloat16)

    def attention_of_one_block(self, *parts: torch.Tensor) -> torch.Tensor:
        """As FlashAttention of a sequence that is one block: ``exp`` rounded for the product, its sum not.

        It is taken to base 2, of an exponent that is rounded once.
        """
        query, key, value = (part.float() for part in self._by_heads(*parts))
        factor = query.shape[-1] ** -0.5 * math.log2(math.e)
        ahead = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ key.transpose(-1, -2)).masked_fill(ahead, -math.inf).double()
        weights = ((scores - scores.amax(-1, keepdim=True)) * factor).float().exp2()
        made = weights.to(torch.bfloat16).float() @ value / weights.sum(-1, keepdim=True)
        return made[0].transpose(0, 1).flatten(1).to(torch.bfloat16)

    def _by_heads(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """[1, heads, tokens, dim] of query, key and value [tokens, ...], keys and values as often as they are read."""
        heads, _, dim = self._heads
        by_heads = (part.view(len(part), -1, dim).transpose(0, 1)[None] for part in parts)
        return [part.repeat_interleave(heads // part.shape[1], 1) for part in by_heads]


def _summed(norm: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def normalized(*parts: torch.Tensor) -> torch.Tensor:
        return norm(parts[0] if len(parts) == 1 else parts[0].float() + parts[1].float())

    return normalized


SO_FAR = {
    "input_layernorm": ("input_layernorm",),
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
"""The trainer's modules, of a layer, that make what an engine's step makes."""


@contextmanager
def outputs_of(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """What modules made last, by their names."""
    made: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():

            def keep(_: Any, __: Any, output: Any, name: str = name) -> None:
                if isinstance(output, torch.Tensor):
                    made[name] = output[0].to(torch.bfloat16)

            stack.enter_context(_removing(module.register_forward_hook(keep)))
        yield made


@contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def compare(
    model: Any, kernels: Kernels, tokens: list[int], by_one: Recorded, at_once: Recorded, named: dict[str, str]
) -> Iterator[Case]:
    """Of every step, in the order of the forward pass."""
    with outputs_of(model) as made:
        model(torch.tensor([tokens], device=DEVICE))
    steps = Steps(model, kernels)
    for layer in range(len(model.model.layers)):
        for step, (name, compute) in steps.of_layer(layer).items():
            inputs = [tensor.to(DEVICE) for tensor in at_once[name]["inputs"]]
            expected = at_once[name]["outputs"][0].to(DEVICE)
            if step == "attention":
                yield rotary_case(steps, layer, by_one, at_once, named)
            modules = [f"model.layers.{layer}.{leaf}" for leaf in SO_FAR.get(step, ())]
            so_far = torch.cat([made[module] for module in modules], -1) if modules else None
            if step == "norm":
                so_far = made["model.norm"]
            yield Case(
                **named,
                layer=layer,
                step=step,
                step_unlike=unlike(compute(*inputs), expected),
                so_far_unlike=None if so_far is None else unlike(so_far, expected),
                engine_unlike=unlike(by_one[name]["outputs"][0].to(DEVICE), expected),
            )


def rotary_case(steps: Steps, layer: int, by_one: Recorded, at_once: Recorded, named: dict[str, str]) -> Case:
    """The rotary embedding, from what both norms made to what attention got."""
    prefix = f"model.layers.{layer}.self_attn"
    query, key = (at_once[f"{prefix}.{norm}"]["outputs"][0].to(DEVICE) for norm in ("q_norm", "k_norm"))
    found = torch.cat(steps.rotated(query, key), -1)
    expected, one_by_one = (
        torch.cat([part.flatten(1) for part in recorded[f"{prefix}.attn"]["inputs"][:2]], -1).to(DEVICE)
        for recorded in (at_once, by_one)
    )
    return Case(**named, layer=layer, step="rotary_emb", step_unlike=unlike(found, expected), so_far_unlike=None,
                engine_unlike=unlike(one_by_one, expected))  # fmt: skip


def unlike(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of unequal numbers, of tensors of as many elements."""
    return float((found.reshape(-1) != expected.reshape(-1)).float().mean())


def measured(options: LayerOptions) -> Iterator[list[Case]]:
    """The cases of an engine and a trainer at a time."""
    sample_options = SampleOptions(steps=options.steps, tokens=options.tokens)
    kernels: Kernels = "cuda_eager" if GPU else "cpu"
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / Model.QWEN3
        make(Model.QWEN3, folder, sample_options)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(DEVICE)
        for engine in options.engine:
            config = config_of(Model.QWEN3, folder, engine, sample_options)
            tokens, by_one, at_once = record(config, options, Path(root))
            quantized = config.quant.weights == "fp8_block"
            for products in PRODUCTS if quantized else (None,):
                named = {"engine": str(engine), "products": products or ""}
                computing = (
                    fake_quant(model, recipe_of(config), kernels=kernels, products=products)
                    if products
                    else engine_roundings(model, kernels)
                )
                with torch.no_grad(), computing:
                    yield list(compare(model, kernels, tokens, by_one, at_once, named))


def main(options: LayerOptions) -> None:
    """Measure, print the tables, and write benchmarks/results/<machine>/mismatch_layers.json."""
    console = Console()
    for cases in measured(options):
        new = [asdict(case) for case in cases]
        results.write(RESULT, {"cases": results.joined(results.cases(RESULT), new, SAME)})
        title = ", ".join(filter(None, (cases[0].engine, cases[0].products)))
        table = Table("layer", "step", "step", "so far", "engine", title=f"{title}: share unequal")
        for case in cases:
            shares = (case.step_unlike, case.so_far_unlike, case.engine_unlike)
            table.add_row(str(case.layer), case.step, *("" if share is None else f"{share:.1e}" for share in shares))
        console.print(table)


if __name__ == "__main__":
    run(main)
