"""What the rounding of an FP8 KV cache costs: k3 against a BF16 cache, with scales of 1 and with the trainer's.

    python -m benchmarks.kv_scales

Small models trained on the spot (``benchmarks/repeating.py``); two of them are the same function with other keys
(``tests/support/key_channels.py``). Weights stay in BF16. An engine with an FP8 cache samples, and one with a BF16
cache scores the same tokens. That one samples and scores some by itself, too: ``floor`` is what sampling and scoring
differ by anyway. Writes benchmarks/results/<machine>/kv_scales.json and the table of docs/numerics.md.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks import results
from benchmarks.repeating import PERIOD, TRAINED_TOKENS, repeating, train
from rollout_service.calibration import ScaledFrom
from rollout_service.calibration.fp8_error import unfit_layers
from rollout_service.calibration.observer import observe_qkv
from rollout_service.config import ServiceConfig
from rollout_service.correction.mismatch import measure_mismatch
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.args import engine_args, engine_environment
from rollout_service.engine.plugin import register
from rollout_service.sampling import Sampling
from rollout_service.types import Completion
from rollout_service.weights.ingest import Ingest
from rollout_service.weights.log import WeightLog
from rollout_service.weights.upload import BeginUpload, CommitUpload, PathSource
from tests.support.key_channels import LOUD, with_key_factors

HEAD_DIM = 64
"""Of the models."""
CALIBRATION, PROMPTS = 10**6, 2 * 10**6
"""Seeds, far from those of training."""
NOT_ROUNDED = "trainer, not rounded"
PAGE = Path(__file__).parents[1] / "docs/numerics.md"
BEGIN, END = "<!-- made by benchmarks/kv_scales.py -->\n", "<!-- end of benchmarks/kv_scales.py -->\n"

Weights = dict[str, torch.Tensor]
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


def loud(weights: Weights) -> Weights:
    """Keys far beyond 448."""
    return with_key_factors(weights, torch.full((HEAD_DIM,), LOUD))


def uneven(weights: Weights) -> Weights:
    """A few huge channels and many tiny ones."""
    factors = torch.full((HEAD_DIM,), 2.0**-12)
    factors[[5, 6, 5 + HEAD_DIM // 2, 6 + HEAD_DIM // 2]] = 2.0**12
    return with_key_factors(weights, factors)


KINDS = (
    Kind("qwen3", "qwen3", "QK-norm"),
    Kind("qwen2", "qwen2", "with bias"),
    Kind("qwen2, loud keys", "qwen2", "the same × 2¹¹", loud),
    Kind("qwen2, uneven keys", "qwen2", "the same, 4 of 64 channels × 2¹², 60 × 2⁻¹²", uneven),
)


@dataclass
class Case:
    """One kind with one sort of scales."""

    kind: Kind
    scales: str
    named: dict[str, float] | None
    """None: 1."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Layers that the trainer would refuse an FP8 cache for, and why."""
    k3: float = 0.0
    standard_error: float = 0.0
    """Of k3, as if tokens were independent."""
    floor: float = 0.0
    tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """As it stands in the results."""
        figures = {key: getattr(self, key) for key in ("k3", "standard_error", "floor", "tokens")}
        return {"model": self.kind.name, "keys": self.kind.keys, "scales": self.scales, **figures, "unfit": self.unfit}


def cases_of(kind: Kind, folder: Path, weights: Weights) -> list[Case]:
    """With scales of 1, with those that a trainer measures, and with those as they are before they are rounded."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.load_state_dict({name: t.float() for name, t in weights.items()}, strict=False)
    model.tie_weights()
    with torch.no_grad():
        with observe_qkv(model.eval()) as observation:
            for seed in range(CALIBRATION, CALIBRATION + 8):
                model(repeating(8, seed))
        scales = observation.scales(kind.name)
        not_rounded = observation.scales(kind.name, ScaledFrom(power_of_two=False))
        with observe_qkv(model, measured_with=scales) as measured:
            model(repeating(8, CALIBRATION))
    unfit = unfit_layers(measured.errors())
    named = {"unit": None, "trainer": scales.named(), NOT_ROUNDED: not_rounded.named()}
    return [Case(kind, what, of_trainer, unfit) for what, of_trainer in named.items()]


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


async def commit(config: ServiceConfig, cases: list[Case], weights: dict[str, Weights]) -> None:
    """Version ``n`` of the log holds case ``n - 1``."""
    ingest = Ingest(config)
    await ingest.start()
    for version, case in enumerate(cases, start=1):
        source = config.weights.root.parent / f"{config.weights.root.name}-{version}"
        source.mkdir()
        save_file(weights[case.kind.name], source / "model.safetensors")
        await ingest.begin(BeginUpload(version=version, source=PathSource(path=source), kv_scales=case.named))
        await ingest.commit(version, CommitUpload())
    await ingest.stop()


@asynccontextmanager
async def engine_of(config: ServiceConfig) -> AsyncIterator[EngineAdapter]:
    """An engine with nothing but dummy weights."""
    os.environ.update(engine_environment(config))  # noqa: TID251 - what the replica's process would have
    register()
    engine = EngineAdapter(engine_args(config, (), has_tokenizer=False), exports=False)
    try:
        await engine.connect()
        yield engine
    finally:
        engine.shutdown()


async def load(engine: EngineAdapter, config: ServiceConfig, version: int) -> None:
    """Have the engine serve a version of the log."""
    await engine.pause("keep")
    await engine.load(WeightLog(config.weights.root).folder(version), version)
    await engine.resume()


async def sample(engine: EngineAdapter, prompts: int, n: int) -> Samples:
    """``n`` completions of each prompt, at temperature 1."""
    starts = [tuple(row) for row in repeating(prompts, PROMPTS, tokens=2 * PERIOD + PERIOD // 2).tolist()]
    sampling = Sampling(n=n, max_tokens=TRAINED_TOKENS, temperature=1.0, ignore_eos=True)
    found = await asyncio.gather(*(engine.generate(f"s{i}", start, sampling) for i, start in enumerate(starts)))
    return [(start, completion) for start, of_start in zip(starts, found, strict=True) for completion in of_start]


async def k3(engine: EngineAdapter, samples: Samples) -> tuple[float, float, int]:
    """Of the engine's own logprobs of the samples' tokens against those that they came with; its standard error, and
    how many tokens.
    """
    scored = await asyncio.gather(
        *(engine.score(f"k{i}", prompt + c.token_ids) for i, (prompt, c) in enumerate(samples))
    )
    exact = [list(logprobs[len(prompt) - 1 :]) for (logprobs, _), (prompt, _) in zip(scored, samples, strict=True)]
    sampled = [list(completion.logprobs) for _, completion in samples]
    mismatch = measure_mismatch(exact, sampled)
    ratios = torch.tensor(exact, dtype=torch.float64) - torch.tensor(sampled, dtype=torch.float64)
    error = float((torch.expm1(ratios) - ratios).std()) / ratios.numel() ** 0.5
    return mismatch.k3, error, mismatch.tokens


async def measure(
    folder: Path, family: str, cases: list[Case], weights: dict[str, Weights], count: int, n: int
) -> None:
    """Fill in what each case of a family costs."""
    fp8, bf16 = (config_of(folder / family, folder / f"log-{family}", dtype) for dtype in ("fp8_e4m3", "bfloat16"))
    await commit(fp8, cases, weights)
    samples: list[Samples] = []
    async with engine_of(fp8) as engine:
        for version in range(1, len(cases) + 1):
            await load(engine, fp8, version)
            samples.append(await sample(engine, count, n))
    async with engine_of(bf16) as engine:
        for version, case in enumerate(cases, start=1):
            await load(engine, fp8, version)
            case.k3, case.standard_error, case.tokens = await k3(engine, samples[version - 1])
            case.floor, *_ = await k3(engine, await sample(engine, count, n))


def markdown(cases: list[Case]) -> str:
    """The table of docs/numerics.md."""
    lines = [
        "| model | keys | scales 1 | trainer's scales | not rounded | BF16 cache | layers refused |",
        "|---|---|---|---|---|---|---|",
    ]
    for of_kind in zip(cases[::3], cases[1::3], cases[2::3], strict=True):
        figures = " | ".join(f"{case.k3:.2g} ± {case.standard_error:.1g}" for case in of_kind)
        kind, unfit, floor = of_kind[0].kind, of_kind[0].unfit, of_kind[0].floor
        lines.append(f"| {kind.name} | {kind.keys} | {figures} | {floor:.2g} | {len(unfit)} of 2 |")
    return "\n".join(lines) + "\n"


def main(steps: int = 200, batch: int = 8, prompts: int = 32, n: int = 4) -> None:
    """Train, measure, print the table, write the JSON and the table of docs/numerics.md."""
    cases, losses = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for family in dict.fromkeys(kind.family for kind in KINDS):
            losses[family] = train(family, folder / family, steps, batch)
            trained = load_file(folder / family / "model.safetensors")
            kinds = [kind for kind in KINDS if kind.family == family]
            weights = {kind.name: kind.changed(trained) for kind in kinds}
            of_family = [case for kind in kinds for case in cases_of(kind, folder / family, weights[kind.name])]
            asyncio.run(measure(folder, family, of_family, weights, prompts, n))
            cases += of_family
    table = markdown(cases)
    print(table)
    rounded, raw = ([c.as_json() for c in cases if (c.scales == NOT_ROUNDED) is wanted] for wanted in (False, True))
    results.write("kv_scales", {"training_loss": losses, "cases": rounded, "not_rounded": raw})
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1])


if __name__ == "__main__":
    typer.run(main)
