"""What the rounding of an FP8 KV cache costs: k3 against a BF16 cache, with scales of 1, the trainer's, the service's.

    python -m benchmarks.mismatch.kv_scales

Small models, trained on the spot to repeat what they have read, which takes attention; two of them are the same
function with other keys (``tests/support/key_channels.py``). Weights stay in BF16. An engine with a BF16 cache samples,
and one with an FP8 cache scores the same tokens with each sort of scales, so that what differs is the scales alone. The
trainer's and the service's are measured on the same batch. Writes benchmarks/results/<machine>/kv_scales.json and the
table of docs/numerics.md.
"""

import asyncio
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine, commit, load_version
from benchmarks.common.marked import write_part
from benchmarks.common.paths import PROJECT
from benchmarks.mismatch.repeating import PERIOD, TRAINED_TOKENS, repeating, train
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.kv_scales import ScaledFrom
from rollout_service.kv_scales.fp8_error import unfit_layers
from rollout_service.kv_scales.observer import observe_qkv
from rollout_service.kv_scales.scales import largest_of_ranks, layer_scales, named_scales
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.upload import BeginUpload, PathSource
from rollout_service.store.log import WeightLog
from tests.support.key_channels import loud, uneven

CALIBRATION, PROMPTS = 10**6, 2 * 10**6
"""Seeds, far from those of training."""
NOT_ROUNDED = "trainer, not rounded"
PAGE, PART = PROJECT / "docs/numerics.md", "benchmarks/mismatch/kv_scales.py"

Weights = dict[str, torch.Tensor]
Named = dict[str, float]
Samples = list[tuple[tuple[int, ...], Completion]]
"""Prompts and completions."""


@dataclass(frozen=True)
class Kind:
    """One of the models."""

    name: str
    family: str
    keys: str
    """What is special about them, in words."""
    changed: Callable[[Weights], Weights] = lambda weights: weights


KINDS = (
    Kind("qwen3", "qwen3", "QK-norm"),
    Kind("qwen2", "qwen2", "with bias"),
    Kind("qwen2, loud keys", "qwen2", "the same × 2¹¹", loud),
    Kind("qwen2, uneven keys", "qwen2", "the same, 4 of 64 channels × 2¹², 60 × 2⁻¹²", uneven),
)


class SampleOptions(Options):
    """Models and samples."""

    steps: int = 200
    """Of training."""
    batch: int = 8
    """Sequences of a step of training."""
    prompts: int = 32
    """Of each model."""
    n: int = 4
    """Completions that are sampled of each prompt."""


@dataclass
class Case:
    """One kind with one sort of scales."""

    kind: Kind
    scales: str
    unfit: dict[str, str] = field(default_factory=dict)
    """Layers that the trainer would refuse an FP8 cache for, and why."""
    terms: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """exp(lr) - 1 - lr of each token, float64; its mean is k3."""
    over_unit: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """The same less that of the same token with scales of 1."""

    def as_json(self) -> dict[str, Any]:
        """As it stands in the results; standard errors are as if tokens were independent."""
        return {
            "model": self.kind.name,
            "keys": self.kind.keys,
            "scales": self.scales,
            "k3": float(self.terms.mean()),
            "standard_error": standard_error(self.terms),
            "over_unit": float(self.over_unit.mean()),
            "over_unit_standard_error": standard_error(self.over_unit),
            "tokens": len(self.terms),
            "unfit": self.unfit,
        }


def standard_error(terms: torch.Tensor) -> float:
    """Of their mean."""
    return float(terms.std()) / math.sqrt(len(terms))


def calibration_batch() -> list[torch.Tensor]:
    """Micro-batches [8, TRAINED_TOKENS] of token ids."""
    return [repeating(8, seed) for seed in range(CALIBRATION, CALIBRATION + 8)]


def from_trainer(kind: Kind, folder: Path, weights: Weights) -> tuple[dict[str, Named], dict[str, str]]:
    """Rounded and exact scales of a forward pass in transformers, and the layers that would be refused."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    found = model.load_state_dict({name: t.float() for name, t in weights.items()}, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}, found
    model.tie_weights()
    with torch.no_grad():
        with observe_qkv(model.eval()) as observation:
            for batch in calibration_batch():
                model(batch)
        scales = observation.scales()
        with observe_qkv(model, measured_with=scales) as measured:
            model(calibration_batch()[0])
    not_rounded = observation.scales(ScaledFrom(power_of_two=False))
    return {"trainer": scales.named(), NOT_ROUNDED: not_rounded.named()}, unfit_layers(measured.errors())


async def from_service(engine: EngineAdapter) -> Named:
    """What the engine that serves measures."""
    sequences = [row.tolist() for batch in calibration_batch() for row in batch]
    ranks = await engine.measure_kv(sequences)
    return named_scales(layer_scales(largest_of_ranks([rank.amax for rank in ranks]), ScaledFrom()))


def config_of(model: Path, root: Path, kv_cache_dtype: str) -> ServiceConfig:
    """Of an engine with BF16 weights."""
    return ServiceConfig.model_validate(
        {
            "model": {"path": model},
            "quant": {"weights": "none"},
            "engine": {"max_model_len": 2 * TRAINED_TOKENS},
            "kv_cache": {"dtype": kv_cache_dtype, "scales_policy": "unit"},
            "weights": {"root": root, "source_roots": [root.parent], "keep_versions": 100},
        }
    )


def uploads(folder: Path, weights: dict[str, Weights]) -> list[BeginUpload]:
    """Versions 1, 2, … of the weights in their order, each in files below ``folder``."""
    found = []
    for version, tensors in enumerate(weights.values(), start=1):
        source = folder / str(version)
        source.mkdir(parents=True)
        save_file(tensors, source / "model.safetensors")
        found.append(BeginUpload(version=version, source=PathSource(path=source)))
    return found


async def load(engine: EngineAdapter, config: ServiceConfig, version: int) -> None:
    """Have the engine serve a version of the log."""
    await load_version(engine, WeightLog(config.weights.root).folder(version), version)


async def sample(engine: EngineAdapter, prompts: int, n: int) -> Samples:
    """``n`` completions of each prompt, at temperature 1."""
    starts = [tuple(row) for row in repeating(prompts, PROMPTS, tokens=2 * PERIOD + PERIOD // 2).tolist()]
    sampling = Sampling(n=n, max_tokens=TRAINED_TOKENS, temperature=1.0, ignore_eos=True)
    found = await asyncio.gather(*(engine.generate(f"s{i}", start, sampling) for i, start in enumerate(starts)))
    return [(start, completion) for start, of_start in zip(starts, found, strict=True) for completion in of_start]


async def k3_terms(engine: EngineAdapter, samples: Samples) -> torch.Tensor:
    """exp(lr) - 1 - lr of each sampled token, float64; lr: the engine's logprob less the one that it came with."""
    scored = await asyncio.gather(
        *(engine.score(f"k{i}", prompt + c.token_ids) for i, (prompt, c) in enumerate(samples))
    )
    again = [logprobs[len(prompt) - 1 :] for (logprobs, _), (prompt, _) in zip(scored, samples, strict=True)]
    sampled = [completion.logprobs for _, completion in samples]
    ratios = torch.tensor(again, dtype=torch.float64) - torch.tensor(sampled, dtype=torch.float64)
    return (torch.expm1(ratios) - ratios).flatten()


async def measure(folder: Path, family: str, weights: dict[str, Weights], options: SampleOptions) -> list[Case]:
    """What each sort of scales costs each kind of a family."""
    kinds = [kind for kind in KINDS if kind.name in weights]
    fp8, bf16 = (config_of(folder / family, folder / f"log-{family}", dtype) for dtype in ("fp8_e4m3", "bfloat16"))
    await commit(fp8, *uploads(folder / f"sources-{family}", weights))
    samples: list[Samples] = []
    async with bare_engine(bf16) as engine:
        for version, _ in enumerate(kinds, start=1):
            await load(engine, fp8, version)
            samples.append(await sample(engine, options.prompts, options.n))
    cases: list[Case] = []
    async with bare_engine(fp8) as engine:
        for version, kind in enumerate(kinds, start=1):
            await load(engine, fp8, version)
            trainer, unfit = from_trainer(kind, folder / family, weights[kind.name])
            await engine.pause("keep")
            service = await from_service(engine)
            await engine.resume()
            unit: torch.Tensor | None = None
            for name, named in {"unit": None, **trainer, "service": service}.items():
                await engine.pause("keep")
                await engine.set_kv_scales(named)
                await engine.resume()
                terms = await k3_terms(engine, samples[version - 1])
                unit = terms if unit is None else unit
                cases.append(Case(kind, name, unfit, terms, terms - unit))
    return cases


def markdown(cases: list[Case]) -> str:
    """The table of docs/numerics.md."""
    lines = [
        "| model | keys | scales 1 | trainer's | service's | service's - 1, by token | not rounded | layers refused |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = {case.scales: case for case in cases if case.kind == kind}
        service = of_kind["service"]
        shown = [of_kind[name].terms for name in ("unit", "trainer", "service")]
        shown += [service.over_unit, of_kind[NOT_ROUNDED].terms]
        figures = " | ".join(f"{terms.mean():.2g} ± {standard_error(terms):.1g}" for terms in shown)
        lines.append(f"| {kind.name} | {kind.keys} | {figures} | {len(service.unfit)} of 2 |")
    return "\n".join(lines) + "\n"


def main(options: SampleOptions) -> None:
    """Train, measure, print the table, write mismatch/kv_scales.json and the table of docs/numerics.md."""
    cases: list[Case] = []
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for family in dict.fromkeys(kind.family for kind in KINDS):
            losses[family] = train(family, folder / family, options.steps, options.batch)
            trained = load_file(folder / family / "model.safetensors")
            weights = {kind.name: kind.changed(trained) for kind in KINDS if kind.family == family}
            cases += asyncio.run(measure(folder, family, weights, options))
    table = markdown(cases)
    print(table)
    rounded, raw = ([c.as_json() for c in cases if (c.scales == NOT_ROUNDED) is wanted] for wanted in (False, True))
    print("wrote", results.write("mismatch_kv_scales", {"training_loss": losses, "cases": rounded, "not_rounded": raw}))
    write_part(PAGE, PART, table)


if __name__ == "__main__":
    run(main)
