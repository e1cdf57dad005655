"""Tokens/s of the service, through HTTP and through its handle, against the bare vLLM engine inside; on a GPU.

    python -m benchmarks.rollout --model qwen3-8b --mode fp8kv --side bare --side handle --side http
    python -m benchmarks.rollout --mode bf16 --mode fp8kv --side bare --envelope-gb 80 --groups 256 --n 1

Random weights of published shapes. All sides have the engine arguments that the service makes of one configuration, and
the same prompts: ``--groups`` distinct ones with ``--n`` completions each, all at once, temperature 1, no end of
sequence. ``--envelope-gb`` is all the GPU memory that an engine may use. Modes: ``bf16``, ``fp8`` (weights), ``fp8kv``
(weights and KV cache). Where a service was measured, the bare engine gets the version that it served; alone it runs on
vLLM's dummy weights. Each run adds its cases to the same file, which says what they are to each other.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
import yaml
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks import results
from benchmarks.rollout_results import earlier_cases, joined, ratios
from benchmarks.shapes import write_config
from rollout_service.client import RolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.deployment_file import BUILDER
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.args import engine_args, engine_environment, not_converted
from rollout_service.engine.plugin import register
from rollout_service.local import APPLICATION, running_service
from rollout_service.sampling import GenerateCall, Sampling
from rollout_service.weights.log import WeightLog
from rollout_service.weights.served_model import ServedModel

MODES: dict[str, dict[str, dict[str, Any]]] = {
    "bf16": {"quant": {"weights": "none"}, "kv_cache": {"dtype": "bfloat16"}},
    "fp8": {"kv_cache": {"dtype": "bfloat16"}},
    "fp8kv": {"kv_cache": {"dtype": "fp8_e4m3"}},
}
SIDES = ("bare", "handle", "http")
FILE_BYTES = 2 << 30

Generate = Callable[[int, list[int]], Awaitable[object]]
"""One request: its number and its prompt."""


@dataclass
class Case:
    """One side of one mode."""

    model: str
    mode: str
    side: str
    envelope_gb: float | None
    start_s: float = 0.0
    """Until the engine, or the service, takes requests."""
    rates: list[float] = field(default_factory=list)
    kv_tokens: int | None = None
    """What the KV cache holds."""
    cores: dict[str, float] = field(default_factory=dict)
    """How many CPU cores each process kept busy meanwhile: ``caller`` is this one, the others are Ray's."""

    def as_json(self) -> dict[str, Any]:
        """With the median."""
        return asdict(self) | {"tokens_per_s": statistics.median(self.rates) if self.rates else None}


@dataclass(frozen=True)
class Work:
    """What every side is asked to do."""

    prompts: list[list[int]]
    sampling: Sampling
    repeats: int

    @property
    def tokens(self) -> int:
        """Of all completions."""
        return len(self.prompts) * self.sampling.n * self.sampling.max_tokens

    async def measure(self, generate: Generate, case: Case) -> None:
        """Tokens/s of each repeat, after a short one that is not counted, and the cores that all of them took."""
        await asyncio.gather(*(generate(-1 - i, prompt[:16]) for i, prompt in enumerate(self.prompts[:4])))
        before, began = cpu_seconds(), time.perf_counter()
        for repeat in range(self.repeats):
            started = time.perf_counter()
            # other first tokens each time, so that no prompt is in the prefix cache from the time before
            prompts = [[*map(int, str(10_000 + repeat)), *prompt] for prompt in self.prompts]
            await asyncio.gather(*(generate(i, prompt) for i, prompt in enumerate(prompts)))
            case.rates.append(self.tokens / (time.perf_counter() - started))
        elapsed_s = time.perf_counter() - began
        case.cores = {name: spent / elapsed_s for name, spent in (cpu_seconds() - before).items()}


def cpu_seconds() -> Counter[str]:
    """CPU seconds of this process and of each kind of Ray's processes on this machine, those of their threads included.

    Serve's replicas are named by their deployment. What an engine's process starts is not in it.
    """
    found = Counter[str]()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            title = (process.cmdline() or [""])[0]
            if title.startswith("ray::") or process.pid == os.getpid():
                name = title.removeprefix("ray::").partition(".")[0].rpartition(":")[2]
                times = process.cpu_times()
                found["caller" if process.pid == os.getpid() else name] += times.user + times.system
    return found


async def bare(config: ServiceConfig, work: Work, case: Case) -> None:
    """The engine alone, with the version that the service left in the log, or with dummy weights."""
    os.environ.update(engine_environment(config))  # noqa: TID251 - the engine's parent is this process
    register()
    model, started = ServedModel.load(config.model.path), time.perf_counter()
    args = engine_args(config, not_converted(model, model.plan(config.quant)), has_tokenizer=False)
    engine = EngineAdapter(args)
    try:
        await engine.connect()
        case.start_s = time.perf_counter() - started
        await load_version(engine, WeightLog(config.weights.root_here()))
        case.kv_tokens = engine.kv_cache_tokens
        await work.measure(lambda _, p: engine.generate(uuid.uuid4().hex, tuple(p), work.sampling), case)
    finally:
        engine.shutdown()


async def load_version(engine: EngineAdapter, log: WeightLog) -> None:
    """The newest one, if there is any."""
    head = log.head()
    if head is None:
        await engine.label(0)  # the dummy weights' label is no version
        return
    await engine.stage(log.folder(head.version))
    await engine.pause("keep")
    await engine.load(log.folder(head.version), head.version)
    await engine.resume()


async def through_http(url: str, work: Work, case: Case) -> None:
    """The client, over HTTP."""
    options = work.sampling.model_dump(include={"n", "max_tokens", "ignore_eos"})
    async with RolloutClient(url) as client:
        await work.measure(lambda _, prompt: client.generate(prompt, **options), case)


async def through_the_handle(config: ServiceConfig, work: Work, case: Case) -> None:
    """The engine deployment's handle, as the gateway uses it, in this process."""
    from ray import serve

    from rollout_service.gateway.dispatch import Dispatcher

    handles = [serve.get_deployment_handle(name, APPLICATION) for name in ("engine", "ingest")]
    dispatcher = Dispatcher(*handles, config.engine)

    def generate(_: int, prompt: list[int]) -> Awaitable[object]:
        call = GenerateCall(request_id=uuid.uuid4().hex, prompt_token_ids=tuple(prompt), sampling=work.sampling)
        return dispatcher.complete(call)

    await work.measure(generate, case)


def served(settings: dict[str, Any], work: Work, cases: list[Case], folder: Path, verbose: bool) -> None:
    """The whole service; its version 0 is made from random weights."""
    deployment = folder / "deployment.yaml"
    deployment.write_text(yaml.safe_dump({"applications": [{"import_path": BUILDER, "args": settings}]}))
    started = time.perf_counter()
    with running_service(deployment, verbose=verbose) as service:
        start_s = time.perf_counter() - started
        for case in cases:
            case.start_s = start_s
            if case.side == "http":
                asyncio.run(through_http(service.url, work, case))
            else:
                asyncio.run(through_the_handle(service.config, work, case))


def write_weights(folder: Path) -> None:
    """Random BF16 weights beside the model's config.json."""
    group: dict[str, torch.Tensor] = {}
    size, number = 0, 0
    shapes = ServedModel.load(folder).shapes
    for i, (name, shape) in enumerate(shapes.items(), start=1):
        group[name] = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02).cpu()
        size += group[name].nbytes
        if size >= FILE_BYTES or i == len(shapes):
            number += 1
            save_file(group, folder / f"model-{number:05d}.safetensors")
            group, size = {}, 0
    torch.cuda.empty_cache()


def settings_of(
    mode: str, model: Path, folder: Path, work: Work, envelope_gb: float | None, more: dict[str, Any]
) -> dict[str, Any]:
    """The configuration of one mode; ``more``: of the engine's."""
    gpu_gb = torch.cuda.get_device_properties(0).total_memory / 1e9
    prompt_tokens = max(map(len, work.prompts)) + 8
    engine = {
        "max_model_len": -(-(prompt_tokens + work.sampling.max_tokens) // 64) * 64,
        "max_num_seqs": len(work.prompts) * work.sampling.n,
        "gpu_memory_utilization": round((envelope_gb or 0.85 * gpu_gb) / gpu_gb, 4),
        "admission_limit": 4096,
    }
    return {
        "model": {"path": str(model)},
        "quant": MODES[mode].get("quant", {}),
        "engine": engine | more,
        "kv_cache": MODES[mode]["kv_cache"],
        "scaling": {"num_gpus": 0.9},
        "weights": {"root": str(folder / f"log-{mode}"), "ingest_num_gpus": 0.1},
    }


def make_work(groups: int, n: int, prompt: tuple[int, int], out: int, repeats: int) -> Work:
    """Distinct prompts of random tokens, their lengths spread evenly over the range."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(*prompt, groups).int().tolist()
    prompts = [torch.randint(1000, 150_000, (length,), generator=generator).tolist() for length in lengths]
    return Work(prompts, Sampling(n=n, max_tokens=out, ignore_eos=True), repeats)


def table_of(cases: list[Case]) -> Table:
    """For people; ratios are to the first line."""
    table = Table(title=f"rollout on {results.machine()}")
    for column in ("model", "mode", "side", "GB", "start, s", "KV cache, tokens", "tokens/s", "ratio"):
        table.add_column(column, justify="left" if column in ("model", "mode", "side") else "right")
    first = statistics.median(cases[0].rates)
    for c in cases:
        rate = statistics.median(c.rates)
        sizes = (f"{c.envelope_gb or 0:.0f}", f"{c.start_s:.0f}", str(c.kv_tokens or ""))
        table.add_row(c.model, c.mode, c.side, *sizes, f"{rate:.0f}", f"{rate / first:.3f}")
    return table


def graph_sizes(step: int | None, sequences: int) -> list[int] | None:
    """Small powers of two, then every multiple of ``step`` up to all sequences at once; None: vLLM's own."""
    if step is None:
        return None
    return sorted({size for size in (1, 2, 4, 8) if size < step} | set(range(step, sequences + step, step)))


def main(
    model: str = "qwen3-8b",
    mode: Annotated[list[str] | None, typer.Option(help="bf16, fp8 or fp8kv; may be repeated.")] = None,
    side: Annotated[list[str] | None, typer.Option(help="bare, handle or http; may be repeated.")] = None,
    groups: int = 16,
    n: int = 16,
    prompt_min: int = 512,
    prompt_max: int = 512,
    out: int = 512,
    repeats: int = 3,
    envelope_gb: float | None = None,
    linear: Annotated[str, typer.Option(help="vLLM's linear_backend for FP8.")] = "cutlass",
    attention: str = "auto",
    block_size: int | None = None,
    batched_tokens: Annotated[int | None, typer.Option(help="Of a step; vLLM's own choice if not given.")] = None,
    graph_step: Annotated[int | None, typer.Option(help="CUDA graphs for multiples of it; else vLLM's sizes.")] = None,
    staging: str = "auto",
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the published model.")] = None,
    folder: Annotated[Path, typer.Option(help="Where weights and versions are put.")] = Path("/dev/shm"),
    name: Annotated[str, typer.Option(help="Of the result's file.")] = "rollout",
    verbose: Annotated[bool, typer.Option(help="Show the service's logs.")] = False,
) -> None:
    """Measure, print the table, and add the cases to benchmarks/results/<machine>/<name>.json."""
    console, cases = Console(), list[Case]()
    more = {
        "linear_backend": linear,
        "attention_backend": attention,
        "block_size": block_size,
        "max_num_batched_tokens": batched_tokens,
        "cuda_graph_sizes": graph_sizes(graph_step, groups * n),
        "staging": staging,
    }
    work = make_work(groups, n, (prompt_min, prompt_max), out, repeats)
    shape = {"groups": groups, "n": n, "prompt_tokens": [prompt_min, prompt_max], "output_tokens": out}
    common = {"run": datetime.now(UTC).isoformat(timespec="seconds"), "layers": layers, "work": shape, "engine": more}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = write_config(model, Path(temporary) / model, layers)
        sides = side or list(SIDES)
        if set(sides) != {"bare"}:
            write_weights(path)
        for each in mode or ["fp8kv"]:
            settings = settings_of(each, path, Path(temporary), work, envelope_gb, more)
            found = [Case(model, each, s, envelope_gb) for s in SIDES if s in sides]
            through_service = [case for case in found if case.side != "bare"]
            if through_service:
                served(settings, work, through_service, Path(temporary), verbose)
            for case in found:
                if case.side == "bare":
                    asyncio.run(bare(ServiceConfig.model_validate(settings), work, case))
            cases += found
            for case in found:
                console.log(json.dumps(case.as_json()))
            add_to_file(name, [case.as_json() | common for case in found])
    console.print(table_of(cases))
    console.print(f"added to {results.path(name)}")


def add_to_file(name: str, new: list[dict[str, Any]]) -> None:
    """After each mode, so that a later one that fails loses nothing."""
    cases = joined(earlier_cases(results.path(name)), new)
    results.write(name, {"cases": cases, "ratios": ratios(cases)}, module="rollout")


if __name__ == "__main__":
    typer.run(main)
