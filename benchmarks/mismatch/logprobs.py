"""How far an engine's logprobs are from those of the same weights in BF16, by the arithmetic that it uses.

    python -m benchmarks.mismatch.logprobs [--family qwen3] [--family qwen3_moe] [--mode bf16 --mode fp8 …]

Small models trained on the spot (``repeating.py``). Each engine samples ``--prompts`` sequences; a forward
pass in fp32 with the unquantized BF16 weights scores the same tokens, and the formulas are those of
``rollout_service.correction``. The row ``bf16`` is what engine and reference differ by anyway. Each run adds its cases
to the same file, in place of earlier ones of the same model and mode.

- ``bf16``: nothing is quantized;
- ``fp8``: weights and activations, by CUTLASS on a GPU as in ``deployments/fp8_rollout.yaml``, by our own kernel on the
  CPU;
- ``fp8kv``: the KV cache, too, with scales of 1;
- ``fp8kv_calibrated``: as ``fp8kv``, with the scales that a trainer measures;
- ``deep_gemm``, ``deep_gemm_e8m0``: as ``fp8``, by DeepGEMM with scales in fp32 or as powers of two; a GPU only.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import results
from benchmarks.mismatch.repeating import PERIOD, repeating, train
from rollout_service.config import ServiceConfig
from rollout_service.correction.metrics import mismatch_metrics
from rollout_service.correction.ratios import compare
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.args import engine_args, engine_environment, not_converted
from rollout_service.engine.plugin import register
from rollout_service.ingest.ingest import Ingest
from rollout_service.kv_scales.observer import observe_qkv
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.upload import BeginUpload, CommitUpload, PathSource
from rollout_service.store.log import WeightLog

BATCH = 16
"""Sequences in a step of training."""
PROMPT_SEED, CALIBRATION_SEED = 10**6, 2 * 10**6
KV_CACHE_BYTES = 1 << 30
ON_A_GPU = ("deep_gemm", "deep_gemm_e8m0")
MODES: dict[str, dict[str, dict[str, Any]]] = {
    "bf16": {"quant": {"weights": "none"}, "kv_cache": {"dtype": "bfloat16"}},
    "fp8": {"kv_cache": {"dtype": "bfloat16"}},
    "fp8kv": {"kv_cache": {"dtype": "fp8_e4m3"}},
    "fp8kv_calibrated": {"kv_cache": {"dtype": "fp8_e4m3"}},
    "deep_gemm": {"kv_cache": {"dtype": "bfloat16"}, "engine": {"linear_backend": "deep_gemm"}},
    "deep_gemm_e8m0": {"kv_cache": {"dtype": "bfloat16"}, "engine": {"linear_backend": "deep_gemm"}},
}

Sampled = list[tuple[list[int], Completion]]
"""Prompts and completions."""


@dataclass(frozen=True)
class Case:
    """One arithmetic of one model."""

    family: str
    mode: str
    tokens: int
    k1: float
    """Mean of engine − reference, nats a token."""
    k3: float
    """Mean of exp(lr) − 1 − lr, lr = reference − engine, nats a token."""
    prob_error: float
    """Mean of exp |lr|."""
    abs_mean: float
    abs_max: float
    nll: float
    """Of the sampled tokens by the reference, nats a token: how sure the model is."""


def mismatch(family: str, mode: str, reference: torch.Tensor, engine: torch.Tensor) -> Case:
    """Of logprobs [completions, tokens] of the same sampled tokens."""
    metrics = mismatch_metrics(compare(reference, engine, torch.ones_like(engine, dtype=torch.bool)))
    return Case(
        family=family,
        mode=mode,
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
    tokens = torch.tensor([[*prompt, *completion.token_ids] for prompt, completion in sampled])
    first = len(sampled[0][0])
    with torch.no_grad():
        logits = torch.cat([model(rows).logits[:, first - 1 : -1] for rows in tokens.split(16)])
    return logits.log_softmax(-1).gather(-1, tokens[:, first:, None])[..., 0]


def measured_scales(model: PreTrainedModel) -> dict[str, float]:
    """Of q, k and v of each layer, as a trainer measures them on sequences like those that are sampled."""
    with torch.no_grad(), observe_qkv(model) as observation:
        for seed in range(CALIBRATION_SEED, CALIBRATION_SEED + 8):
            model(repeating(8, seed))
    return observation.scales(type(model).__name__).named()


async def commit(config: ServiceConfig, kv_scales: dict[str, float] | None) -> int:
    """Version 0 is the model; 1 is, too, with these scales of the KV cache, if there are any. Returns the newest."""
    ingest = Ingest(config)
    await ingest.start()
    if kv_scales is not None:
        await ingest.begin(BeginUpload(version=1, source=PathSource(path=config.model.path), kv_scales=kv_scales))
        await ingest.commit(1, CommitUpload())
    await ingest.stop()
    return int(kv_scales is not None)


@asynccontextmanager
async def engine(config: ServiceConfig, mode: str, version: int) -> AsyncIterator[EngineAdapter]:
    """An engine with a version of the log."""
    # DeepGEMM's kernels are compiled when they are needed; the warm-up would compile all that could be
    own = {"VLLM_USE_DEEP_GEMM_E8M0": str(int(mode == "deep_gemm_e8m0")), "VLLM_DEEP_GEMM_WARMUP": "skip"}
    os.environ.update(engine_environment(config) | own)  # noqa: TID251 - the engine's parent is this process
    register()
    model = ServedModel.load(config.model.path)
    args = engine_args(config, not_converted(model, model.plan(config.quant)), has_tokenizer=False)
    if torch.cuda.is_available():
        args.kv_cache_memory_bytes = KV_CACHE_BYTES  # nothing is measured: others may use the GPU meanwhile
    adapter, folder = EngineAdapter(args), WeightLog(config.weights.root).folder(version)
    try:
        await adapter.connect()
        await adapter.stage(folder)
        await adapter.pause("keep")
        await adapter.load(folder, version)
        await adapter.resume()
        yield adapter
    finally:
        adapter.shutdown()


async def sample(
    config: ServiceConfig, mode: str, prompts: list[list[int]], tokens: int, kv_scales: dict[str, float] | None
) -> Sampled:
    """One completion of each prompt."""
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    async with engine(config, mode, await commit(config, kv_scales)) as adapter:
        calls = [adapter.generate(f"{i}", tuple(prompt), sampling) for i, prompt in enumerate(prompts)]
        return [(prompt, found[0]) for prompt, found in zip(prompts, await asyncio.gather(*calls), strict=True)]


def measure(family: str, modes: list[str], folder: Path, prompts: list[list[int]], tokens: int) -> Iterator[Case]:
    """All modes of one trained model."""
    reference = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32).eval()
    for mode in modes:
        settings = {
            "model": {"path": folder / family},
            "quant": MODES[mode].get("quant", {}),
            "engine": {"max_model_len": 512, "gpu_memory_utilization": 0.2, "enforce_eager": True}
            | ({"linear_backend": "cutlass"} if torch.cuda.is_available() else {})
            | MODES[mode].get("engine", {}),
            "kv_cache": MODES[mode]["kv_cache"],
            "weights": {"root": folder / f"log-{family}-{mode}", "source_roots": [folder]},
        }
        scales = measured_scales(reference) if mode == "fp8kv_calibrated" else None
        sampled = asyncio.run(sample(ServiceConfig.model_validate(settings), mode, prompts, tokens, scales))
        engines = torch.tensor([completion.logprobs for _, completion in sampled])
        yield mismatch(family, mode, score(reference, sampled), engines)


def table_of(cases: list[Case]) -> Table:
    """For people."""
    table = Table(title=f"engine against an fp32 forward pass with BF16 weights, on {results.machine()}")
    for column in ("model", "mode", "k1", "k3", "mean exp|lr|", "mean |lr|", "max |lr|", "nll"):
        table.add_column(column, justify="left" if column in ("model", "mode") else "right")
    for c in cases:
        numbers = (f"{c.k1:+.1e}", f"{c.k3:.1e}", f"{c.prob_error:.4f}", f"{c.abs_mean:.4f}", f"{c.abs_max:.2f}")
        table.add_row(c.family, c.mode, *numbers, f"{c.nll:.2f}")
    return table


def main(
    family: Annotated[list[str] | None, typer.Option(help="Of tests/support/models.py; may be repeated.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="May be repeated; all that this machine has.")] = None,
    steps: Annotated[int, typer.Option(help="Of training.")] = 300,
    prompts: int = 128,
    tokens: Annotated[int, typer.Option(help="Sampled for each prompt.")] = 48,
) -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/logprobs.json."""
    console, cases, losses = Console(), list[Case](), dict[str, float]()
    on_gpu = torch.cuda.is_available()
    modes = mode or [name for name in MODES if on_gpu or name not in ON_A_GPU]
    starts = repeating(prompts, PROMPT_SEED, tokens=PERIOD + 4).tolist()
    with tempfile.TemporaryDirectory() as folder:
        for name in family or ["qwen3", "qwen3_moe"]:
            losses[name] = train(name, Path(folder) / name, steps, BATCH)
            console.log(f"{name}: trained to {losses[name]:.3f} nats a token")
            for case in measure(name, modes, Path(folder), starts, tokens):  # each is kept, whatever the next one does
                cases.append(case)
                console.log(f"wrote {add_to_file(case, steps, prompts, losses[name])}")
    console.print(table_of(cases))


def add_to_file(case: Case, steps: int, prompts: int, loss: float) -> Path:
    """In place of an earlier one of the same model and mode. ``loss``: the last one of the model's training."""
    file, case_id = results.path("logprobs"), (case.family, case.mode)
    earlier = json.loads(file.read_text())["cases"] if file.exists() else []
    kept = [c for c in earlier if (c["family"], c["mode"]) != case_id]
    new = asdict(case) | {"steps": steps, "prompts": prompts, "loss": loss}
    return results.write("logprobs", {"cases": [*kept, new]})


if __name__ == "__main__":
    typer.run(main)
