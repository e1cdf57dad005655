"""Which kernels a decode step spends its time in: torch's profiler in the bare engine, on a GPU.

    python -m benchmarks.kernels.decode_profile --model qwen3-8b --mode bf16 --mode fp8kv

Groups of rollouts as in ``benchmarks.rollout.throughput``; once all of them decode, ``--steps`` steps are recorded.
vLLM writes a trace; its kernels are counted here by what they do. *idle* is time between the first and the last kernel
in which none ran.
"""

import asyncio
import gzip
import json
import os
import re
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from vllm.config import ProfilerConfig

from benchmarks.common import results
from benchmarks.common.gpu_service import graph_sizes, settings_of
from benchmarks.common.rollout_work import Work, make_work
from benchmarks.common.shapes import write_config
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.args import engine_args, engine_environment, not_converted
from rollout_service.engine.plugin import register
from rollout_service.fleet.autoscaling import RUNNING, WAITING
from rollout_service.model.served_model import ServedModel

KINDS = {
    "writing the KV cache": r"reshape_and_cache|cache_kernel|concat_and_cache",
    "quantizing activations": r"per_token_group|quant",
    "attention": r"flash|fmha|attention|splitkv|combine",
    "experts": r"fused_moe|moe_|topk_gating|expert|silu_and_mul",
    "matrix products": r"gemm|nvjet|cutlass|cublas|wgmma|matmul|splitK",
    "sampling": r"sampl|gumbel|logprob|topk|top_k|softmax|argmax|logits|ranks|temperature|sort|penalt",
    "norms, rotations, activations": r"triton_|norm|rotary|act_and_mul",
}
"""What a kernel does → what its name contains; the first that matches."""

Json = dict[str, Any]


def kind_of(kernel: str) -> str:
    """Which of ``KINDS``; else ``other``."""
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE)), "other")


def summary(events: Iterable[Json], top: int = 30) -> Json:
    """Milliseconds of a step by kind and by kernel, from a Chrome trace's events.

    vLLM marks each step with the sequences in it; ``batches`` says how often which mark was seen.
    """
    events = list(events)
    marks = [e["name"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("execute_")]
    kernels, steps = [event for event in events if event.get("cat") == "kernel"], len(marks)
    if not kernels or not steps:
        raise ValueError(f"the trace holds {len(kernels)} kernels of {steps} steps: was a GPU profiled?")
    by_name, launches = Counter[str](), Counter[str]()
    for event in kernels:
        by_name[event["name"]] += event["dur"]
        launches[event["name"]] += 1
    span = max(e["ts"] + e["dur"] for e in kernels) - min(e["ts"] for e in kernels)
    by_kind = Counter[str]()
    for name, micros in by_name.items():
        by_kind[kind_of(name)] += micros
    by_kind["idle"] = span - _busy(kernels)
    return {
        "batches": dict(Counter(marks)),
        "step_ms": span / steps / 1e3,
        "ms": {kind: micros / steps / 1e3 for kind, micros in by_kind.most_common()},
        "kernels": [
            {"name": name[:200], "kind": kind_of(name), "ms": micros / steps / 1e3, "launches": launches[name] / steps}
            for name, micros in by_name.most_common(top)
        ],
    }


def _busy(kernels: list[Json]) -> float:
    """Microseconds in which at least one of them ran."""
    busy, end = 0.0, float("-inf")
    for event in sorted(kernels, key=lambda e: float(e["ts"])):
        start, stop = event["ts"], event["ts"] + event["dur"]
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy


async def profile(config: ServiceConfig, work: Work, steps: int, folder: Path) -> Json:
    """One engine with vLLM's dummy weights."""
    os.environ.update(engine_environment(config))  # noqa: TID251 - the engine's parent is this process
    register()
    model = ServedModel.load(config.model.path)
    args = engine_args(config, not_converted(model, model.plan(config.quant)), has_tokenizer=False)
    args.profiler_config = ProfilerConfig(
        profiler="torch", torch_profiler_dir=str(folder), torch_profiler_with_stack=False, ignore_frontend=True
    )
    engine = EngineAdapter(args)
    try:
        await engine.connect()
        await engine.label(0)  # the dummy weights' label is no version
        rollouts = [
            asyncio.create_task(engine.generate(uuid.uuid4().hex, tuple(p), work.sampling)) for p in work.prompts
        ]
        await _until_all_decode(engine, len(work.prompts) * work.sampling.n, rollouts)
        await engine._llm.start_profile(max_iterations=steps)
        await asyncio.sleep(0.1 * steps)
        await engine._llm.stop_profile()
        for rollout in rollouts:
            rollout.cancel()
        for rollout in rollouts:
            with suppress(asyncio.CancelledError):
                await rollout
    finally:
        engine.shutdown()
    return read_trace(folder)


async def _until_all_decode(engine: EngineAdapter, sequences: int, rollouts: list[asyncio.Task[Any]]) -> None:
    deadline = time.monotonic() + 120
    while True:
        load = engine.scheduler.load(sequences)
        if (load[RUNNING], load[WAITING]) == (sequences, 0.0):
            break
        if time.monotonic() > deadline or any(rollout.done() for rollout in rollouts):
            raise RuntimeError(f"{sequences} sequences were never decoded at once: {load}")
        await asyncio.sleep(0.05)
    await asyncio.sleep(2.0)  # the last prompts are still being read


def read_trace(folder: Path) -> Json:
    """The one trace in the folder."""
    [file] = [path for path in folder.rglob("*.json*") if path.is_file()]
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        return summary(json.load(stream)["traceEvents"])


def table_of(cases: list[Json]) -> Table:
    """For people: milliseconds of a step."""
    table = Table(title=f"milliseconds of a decode step on {results.machine()}")
    for column in ("", *(f"{c['model']} {c['mode']}" for c in cases)):
        table.add_column(column, justify="right" if column else "left")
    kinds = dict.fromkeys(kind for case in cases for kind in case["ms"])
    for kind in kinds:
        table.add_row(kind, *(f"{case['ms'].get(kind, 0):.2f}" for case in cases))
    table.add_row("a step", *(f"{case['step_ms']:.2f}" for case in cases))
    return table


def main(
    model: Annotated[list[str] | None, typer.Option(help="qwen3-8b or qwen3-30b-a3b; may be repeated.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="bf16, fp8 or fp8kv; may be repeated.")] = None,
    groups: int = 16,
    n: int = 16,
    prompt: int = 4096,
    out: int = 1024,
    steps: int = 20,
    linear: Annotated[str, typer.Option(help="vLLM's linear_backend for FP8.")] = "cutlass",
    block_size: int | None = 64,
    graph_step: Annotated[int | None, typer.Option(help="CUDA graphs for multiples of it; else vLLM's sizes.")] = None,
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the published model.")] = None,
) -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/decode_profile.json."""
    console, cases = Console(), list[Json]()
    more = {"linear_backend": linear, "block_size": block_size, "staging": "none"}
    more["cuda_graph_sizes"] = graph_sizes(graph_step, groups * n)
    work = make_work(groups, n, (prompt, prompt), out, repeats=1)
    for name in model or ["qwen3-8b"]:
        for each in mode or ["bf16", "fp8kv"]:
            with tempfile.TemporaryDirectory() as folder:
                path = write_config(name, Path(folder) / name, layers)
                config = ServiceConfig.model_validate(settings_of(each, path, Path(folder), work, more))
                found = asyncio.run(profile(config, work, steps, Path(folder) / "trace"))
            cases.append({"model": name, "mode": each, **found})
            shape = {"groups": groups, "n": n, "prompt_tokens": prompt, "layers": layers, "engine": more}
            results.write("decode_profile", {**shape, "cases": cases})
    console.print(table_of(cases))


if __name__ == "__main__":
    typer.run(main)
