"""How far an engine's logprobs are from a trainer's of the same weights, by the arithmetic that both use.

    python -m benchmarks.mismatch.logprobs [--family qwen3] [--family qwen3_moe] [--mode bf16 --mode fp8 …]

Small models trained on the spot (``repeating.py``). Each engine samples ``--prompts`` sequences; forward passes with
the unquantized BF16 weights score the same tokens, and the formulas are those of ``rollout_service.correction``. The
row ``bf16`` is what engine and trainer differ by anyway. Each run adds its cases to the same file, in place of earlier
ones of the same model, mode and trainer.

Trainers compute in ``fp32`` or in ``bf16``; ``engine_roundings`` is ``bf16`` rounded where the engine rounds, for
engines with BF16 weights, and ``fake_quant`` that with the engine's FP8 in its layers, for those with FP8 weights
(``rollout_service.quant``); both have a head in fp32 where the engine has. Engines:

- ``bf16``: nothing is quantized;
- ``bf16_fp32_head``, ``fp8_fp32_head``: as the rows without, with ``engine.lm_head: float32``;
- ``fp8``: weights and activations, by CUTLASS on a GPU as in ``deployments/fp8_rollout.yaml``, by our own kernel on the
  CPU;
- ``int8``: weights by output channel and activations by token; the CPU only;
- ``fp8kv``: the KV cache, too, with scales of 1;
- ``fp8kv_calibrated``: as ``fp8kv``, with the scales that a trainer measures;
- ``deep_gemm``, ``deep_gemm_e8m0``: as ``fp8``, by DeepGEMM with scales in fp32 or as powers of two; a GPU only.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine, commit, load_version
from benchmarks.mismatch.repeating import PERIOD, repeating, train
from rollout_service.config import ServiceConfig
from rollout_service.correction.metrics import mismatch_metrics
from rollout_service.correction.ratios import compare
from rollout_service.kv_scales.observer import observe_qkv
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.upload import BeginUpload, PathSource, TrainerRecipe
from rollout_service.quant.engine_roundings import engine_roundings
from rollout_service.quant.fake_quant import fake_quant
from rollout_service.quant.forwards import Forwards
from rollout_service.store.log import WeightLog

RESULT = "mismatch_logprobs"
SAME = ("family", "mode", "trainer")
"""Fields in which two cases agree that measured the same."""
BATCH = 16
"""Sequences in a step of training."""
PROMPT_SEED, CALIBRATION_SEED = 10**6, 2 * 10**6
KV_CACHE_BYTES = 1 << 30


class Arithmetic(StrEnum):
    """Of an engine: see the list above."""

    BF16 = "bf16"
    BF16_FP32_HEAD = "bf16_fp32_head"
    FP8 = "fp8"
    FP8_FP32_HEAD = "fp8_fp32_head"
    INT8 = "int8"
    FP8KV = "fp8kv"
    FP8KV_CALIBRATED = "fp8kv_calibrated"
    DEEP_GEMM = "deep_gemm"
    DEEP_GEMM_E8M0 = "deep_gemm_e8m0"


ON_A_GPU = (Arithmetic.DEEP_GEMM, Arithmetic.DEEP_GEMM_E8M0)
SECTIONS: dict[Arithmetic, dict[str, dict[str, Any]]] = {
    Arithmetic.BF16: {"quant": {"weights": "none"}, "kv_cache": {"dtype": "bfloat16"}},
    Arithmetic.BF16_FP32_HEAD: {
        "quant": {"weights": "none"},
        "kv_cache": {"dtype": "bfloat16"},
        "engine": {"lm_head": "float32"},
    },
    Arithmetic.FP8: {"kv_cache": {"dtype": "bfloat16"}},
    Arithmetic.FP8_FP32_HEAD: {"kv_cache": {"dtype": "bfloat16"}, "engine": {"lm_head": "float32"}},
    Arithmetic.INT8: {"quant": {"weights": "int8_channel"}, "kv_cache": {"dtype": "bfloat16"}},
    Arithmetic.FP8KV: {"kv_cache": {"dtype": "fp8_e4m3"}},
    Arithmetic.FP8KV_CALIBRATED: {"kv_cache": {"dtype": "fp8_e4m3"}},
    Arithmetic.DEEP_GEMM: {"kv_cache": {"dtype": "bfloat16"}, "engine": {"linear_backend": "deep_gemm"}},
    Arithmetic.DEEP_GEMM_E8M0: {"kv_cache": {"dtype": "bfloat16"}, "engine": {"linear_backend": "deep_gemm"}},
}


def of_this_machine() -> tuple[Arithmetic, ...]:
    """What engines on this machine can do."""
    without = () if torch.cuda.is_available() else ON_A_GPU
    return tuple(each for each in Arithmetic if each not in without)


class SampleOptions(Options):
    """Models and samples."""

    family: tuple[str, ...] = ("qwen3", "qwen3_moe")
    """Of tests/support/models.py; may be repeated."""
    mode: tuple[Arithmetic, ...] = Field(default_factory=of_this_machine)
    """May be repeated; all that this machine has."""
    steps: int = 300
    """Of training."""
    prompts: int = 128
    """One completion is sampled of each."""
    tokens: int = 48
    """Sampled for each prompt."""


Sampled = list[tuple[list[int], Completion]]
"""Prompts and completions."""


@dataclass(frozen=True)
class Case:
    """One arithmetic of one model."""

    family: str
    mode: str
    trainer: str
    tokens: int
    k1: float
    """Mean of engine − trainer, nats a token."""
    k3: float
    """Mean of exp(lr) − 1 − lr, lr = trainer − engine, nats a token."""
    prob_error: float
    """Mean of exp |lr|."""
    abs_mean: float
    abs_max: float
    nll: float
    """Of the sampled tokens by the trainer, nats a token: how sure the model is."""


def mismatch(family: str, mode: str, trainer: str, scored: torch.Tensor, engine: torch.Tensor) -> Case:
    """Of logprobs [completions, tokens] of the same sampled tokens."""
    metrics = mismatch_metrics(compare(scored, engine, torch.ones_like(engine, dtype=torch.bool)))
    return Case(
        family=family,
        mode=mode,
        trainer=trainer,
        tokens=engine.numel(),
        k1=metrics["kl"],
        k3=metrics["k3_kl"],
        prob_error=metrics["token_mult_prob_error"],
        abs_mean=metrics["rollout_train_logprobs_abs_diff_mean"],
        abs_max=metrics["rollout_train_logprobs_abs_diff_max"],
        nll=metrics["training_log_ppl"],
    )


def score(model: PreTrainedModel, sampled: Sampled) -> torch.Tensor:
    """Logprobs of the completions' tokens [completions, tokens]; all prompts and all completions of one length."""
    rows = [[*prompt, *completion.token_ids] for prompt, completion in sampled]
    tokens = torch.tensor(rows, device=model.device)
    first = len(sampled[0][0])
    with torch.no_grad():
        logits = torch.cat([model(part).logits[:, first - 1 : -1].float() for part in tokens.split(16)])
    return logits.log_softmax(-1).gather(-1, tokens[:, first:, None])[..., 0].cpu()


def measured_scales(model: PreTrainedModel) -> dict[str, float]:
    """Of q, k and v of each layer, as a trainer measures them on sequences like those that are sampled."""
    with torch.no_grad(), observe_qkv(model) as observation:
        for seed in range(CALIBRATION_SEED, CALIBRATION_SEED + 8):
            model(repeating(8, seed))
    return observation.scales(type(model).__name__).named()


async def sample(
    config: ServiceConfig, mode: Arithmetic, options: SampleOptions, kv_scales: dict[str, float] | None
) -> Sampled:
    """One completion of each prompt. ``kv_scales``: a version 1 of the model has them."""
    again = BeginUpload(version=1, source=PathSource(path=config.model.path), kv_scales=kv_scales)
    version = await commit(config, *([] if kv_scales is None else [again]))
    sampling = Sampling(max_tokens=options.tokens, ignore_eos=True)
    prompts = repeating(options.prompts, PROMPT_SEED, tokens=PERIOD + 4).tolist()
    # DeepGEMM's kernels are compiled when they are needed; the warm-up would compile all that could be
    e8m0 = str(int(mode == Arithmetic.DEEP_GEMM_E8M0))
    environment = {"VLLM_USE_DEEP_GEMM_E8M0": e8m0, "VLLM_DEEP_GEMM_WARMUP": "skip"}
    # nothing is measured: others may use the GPU meanwhile
    arguments = {"kv_cache_memory_bytes": KV_CACHE_BYTES} if torch.cuda.is_available() else {}
    async with bare_engine(config, environment=environment, arguments=arguments) as engine:
        await load_version(engine, WeightLog(config.weights.root).folder(version), version)
        calls = [engine.generate(f"{i}", tuple(prompt), sampling) for i, prompt in enumerate(prompts)]
        return [(prompt, found[0]) for prompt, found in zip(prompts, await asyncio.gather(*calls), strict=True)]


def measure(family: str, folder: Path, options: SampleOptions) -> Iterator[Case]:
    """All modes of one trained model, which is in ``folder``."""
    reference = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32).eval()
    in_bf16 = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.bfloat16).eval()
    for mode in options.mode:
        config = config_of(folder / family, folder / f"log-{family}-{mode}", mode)
        scales = measured_scales(reference) if mode == Arithmetic.FP8KV_CALIBRATED else None
        sampled = asyncio.run(sample(config, mode, options, scales))
        engines = torch.tensor([completion.logprobs for _, completion in sampled])
        yield mismatch(family, mode, "fp32", score(reference, sampled), engines)
        yield mismatch(family, mode, "bf16", score(in_bf16, sampled), engines)
        if mode != Arithmetic.INT8:
            with as_the_engine(in_bf16, config) as trainer:
                yield mismatch(family, mode, trainer, score(in_bf16, sampled), engines)


@contextmanager
def as_the_engine(model: PreTrainedModel, config: ServiceConfig) -> Iterator[str]:
    """The model computes as the engine with that configuration inside the block; how that is called."""
    with ExitStack() as stack:
        if config.engine.lm_head == "float32":
            head = Forwards({model.lm_head: lambda hidden: linear(hidden.float(), model.lm_head.weight.float())})
            stack.callback(head.remove)
        if config.quant.weights == "none":
            stack.enter_context(engine_roundings(model))
            yield "engine_roundings"
        else:
            stack.enter_context(fake_quant(model, recipe_of(config)))
            yield "fake_quant"


def recipe_of(config: ServiceConfig) -> TrainerRecipe:
    """What the ingest of a service with that configuration tells its trainer."""
    model = ServedModel.load(config.model.path)
    plan = model.plan(config.quant)
    return TrainerRecipe(weights=config.quant.weights, quantized=tuple(plan.quantized), experts=model.experts)


def config_of(model: Path, root: Path, mode: Arithmetic) -> ServiceConfig:
    """Of an engine with that arithmetic."""
    engine: dict[str, Any] = {"max_model_len": 512, "gpu_memory_utilization": 0.2, "enforce_eager": True}
    if torch.cuda.is_available():
        engine |= {"linear_backend": "cutlass"}
    sections = SECTIONS[mode]
    return ServiceConfig.model_validate(
        {
            **sections,
            "model": {"path": model},
            "engine": engine | sections.get("engine", {}),
            "weights": {"root": root, "source_roots": [root.parent]},
        }
    )


def table_of(cases: list[Case]) -> Table:
    """For people."""
    table = Table(title=f"engine against a forward pass of a trainer with BF16 weights, on {results.machine()}")
    for column in ("model", "mode", "trainer", "k1", "k3", "mean exp|lr|", "mean |lr|", "max |lr|", "nll"):
        table.add_column(column, justify="left" if column in ("model", "mode", "trainer") else "right")
    for c in cases:
        numbers = (f"{c.k1:+.1e}", f"{c.k3:.1e}", f"{c.prob_error:.4f}", f"{c.abs_mean:.4f}", f"{c.abs_max:.2f}")
        table.add_row(c.family, c.mode, c.trainer, *numbers, f"{c.nll:.2f}")
    return table


def main(options: SampleOptions) -> None:
    """Measure, print the table, and add the cases to benchmarks/results/<machine>/mismatch/logprobs.json."""
    console, cases = Console(), list[Case]()
    with tempfile.TemporaryDirectory() as folder:
        for family in options.family:
            loss = train(family, Path(folder) / family, options.steps, BATCH)
            console.log(f"{family}: trained to {loss:.3f} nats a token")
            for case in measure(family, Path(folder), options):
                cases.append(case)
                console.log(f"wrote {keep(case, options, loss)}")  # each is kept, whatever the next one does
    console.print(table_of(cases))


def keep(case: Case, options: SampleOptions, loss: float) -> Path:
    """In place of an earlier one with the same ``SAME``. ``loss``: the last one of the model's training."""
    new = asdict(case) | {"steps": options.steps, "prompts": options.prompts, "loss": loss}
    return results.write(RESULT, {"cases": results.joined(results.cases(RESULT), [new], SAME)})


if __name__ == "__main__":
    run(main)
