"""Which kernels a decode step spends its time in: torch's profiler in the bare engine, on a GPU.

    python -m benchmarks.kernels.decode_profile --model qwen3-8b --mode bf16 --mode fp8kv

Groups of rollouts as in ``benchmarks.rollout.throughput``; once all of them decode, ``--steps`` steps are recorded.
vLLM writes a trace; its kernels are counted here by what they do. *idle* is time between the first and the last kernel
in which none ran.
"""

import asyncio
import gzip
import itertools
import json
import re
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm.config import ProfilerConfig

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine
from benchmarks.common.gpu_service import EngineOptions, Mode, fitting, settings_of
from benchmarks.common.results import Json
from benchmarks.common.shapes import Shape, write_config
from benchmarks.common.work import Work, WorkOptions
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.fleet.autoscaling import RUNNING, WAITING

NORMS = "norms, rotations, activations"
KINDS = (
    # what Inductor compiles has the names of all that was in it, also of what is called with its result
    (NORMS, r"^triton_(poi|red|per|tem)_"),
    ("writing the KV cache", r"reshape_and_cache|cache_kernel|concat_and_cache"),
    (
        "group attention",
        r"^(choose_prefixes|form_chunks|fill_batch|spread_queries|merge_rows|decode_part|merge_parts)\b",
    ),
    ("quantizing activations", r"per_token_group|quant"),
    ("FlashAttention", r"flash"),
    ("attention", r"fmha|attention|splitkv"),
    ("experts", r"fused_moe|moe_|topk_gating|expert|silu_and_mul"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|wgmma|matmul|splitK"),
    ("sampling", r"sampl|gumbel|logprob|topk|top_k|softmax|argmax|logits|ranks|temperature|sort|penalt"),
    (NORMS, r"triton_|norm|rotary|act_and_mul"),
)
"""What a kernel does, and what its name contains; the first that matches."""


class ProfileOptions(Options):
    """What is profiled."""

    model: tuple[Shape, ...] = (Shape.QWEN3_8B,)
    """Whose shapes; may be repeated."""
    mode: tuple[Mode, ...] = (Mode.BF16, Mode.FP8KV)
    """May be repeated."""
    layers: int | None = None
    """Fewer layers than the published model."""
    steps: int = 20
    """Decode steps that are recorded."""


class ProfiledWork(WorkOptions):
    """The work."""

    prompt_min: int = 4096
    """Tokens of the shortest prompt."""
    prompt_max: int = 4096
    """Tokens of the longest prompt; lengths are spread evenly between them."""
    out: int = 1024
    """Tokens of a completion."""


class ProfiledEngine(EngineOptions):
    """The engine."""

    block_size: int | None = 64
    """Tokens of a page of the KV cache."""
    staging: str = "none"
    """Where versions would be staged: there are none."""


def kind_of(kernel: str) -> str:
    """Which of ``KINDS``; else ``other``."""
    return next((kind for kind, names in KINDS if re.search(names, kernel, re.IGNORECASE)), "other")


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


def profiler_into(folder: Path) -> ProfilerConfig:
    """vLLM's argument ``profiler_config``: traces are put into the folder."""
    return ProfilerConfig(
        profiler="torch", torch_profiler_dir=str(folder), torch_profiler_with_stack=False, ignore_frontend=True
    )


async def profile(config: ServiceConfig, work: Work, steps: int, folder: Path) -> Json:
    """One engine with vLLM's dummy weights."""
    async with bare_engine(config, arguments={"profiler_config": profiler_into(folder)}) as engine:
        await engine.label(0)  # the dummy weights' label is no version
        async with decoding(engine, work) as rollouts:
            await _until_all_decode(engine, len(work.prompts) * work.n, rollouts)
            return await recorded(engine, steps, folder)


@asynccontextmanager
async def decoding(engine: EngineAdapter, work: Work) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """The work's requests, from their beginning; what of them is left when the block ends is cancelled."""
    rollouts = [asyncio.create_task(engine.generate(uuid.uuid4().hex, tuple(p), work.sampling)) for p in work.prompts]
    try:
        yield rollouts
    finally:
        for rollout in rollouts:
            rollout.cancel()
        for rollout in rollouts:
            with suppress(asyncio.CancelledError):
                await rollout


async def recorded(engine: EngineAdapter, steps: int, folder: Path) -> Json:
    """The next steps of an engine that has ``profiler_into(folder)``, as ``summary``. One that waits has none."""
    before = _traces(folder)
    await engine._llm.start_profile(max_iterations=steps)
    await asyncio.sleep(0.1 * steps)
    await engine._llm.stop_profile()
    [file] = _traces(folder) - before
    return read_trace(file)


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


def _traces(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*.json*") if path.is_file()}


def read_trace(file: Path) -> Json:
    """One trace, as ``summary``."""
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


def main(options: ProfileOptions, work: ProfiledWork, engine: ProfiledEngine) -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/kernels/decode_profile.json."""
    console, cases = Console(), list[Json]()
    engine_settings = engine.settings(work.sequences)
    for name, mode in itertools.product(options.model, options.mode):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            path = write_config(name, folder / name, options.layers)
            config = ServiceConfig.model_validate(settings_of(mode, path, folder, fitting(work) | engine_settings))
            found = asyncio.run(profile(config, work.make(), options.steps, folder / "trace"))
        cases.append({"model": name, "mode": mode, **found})
        shape = {"work": work.as_json(), "layers": options.layers, "engine": engine_settings}
        results.write("kernels_decode_profile", {**shape, "cases": cases})
    console.print(table_of(cases))


if __name__ == "__main__":
    run(main)
