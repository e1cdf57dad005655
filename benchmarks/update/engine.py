"""How long an engine is closed for a full update of published shapes, by our doors and by vLLM's own reload.

    python -m benchmarks.update.engine [--model qwen3-8b] [--model qwen3-30b-a3b]

Random weights in FP8 and a GPU. Each door loads the same version, from ``--folder`` (memory, if that is a tmpfs), into
an engine that generates ``--concurrent`` rollouts all the while: *closed* is from the pause until it runs again.

- ``native``: vLLM's layerwise reload, all tensors on the GPU before it closes;
- ``device``: our load plan, from the same staging area on the GPU;
- ``host``: our load plan, from pinned host memory;
- ``files``: no staging area; layerwise from the version's files.
"""

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.random_weights import gaussian
from benchmarks.common.shapes import write_config
from benchmarks.update.busy import busy
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.args import engine_args, engine_environment, not_converted
from rollout_service.engine.plugin import register
from rollout_service.model.convert import Converter, tensor_bytes
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.quantizer import Quantizer
from rollout_service.store.manifest import MANIFEST_FILE, Manifest, Recipe
from rollout_service.store.writer import VersionWriter

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 400
DOORS = ["native", "device", "host", "files"]


@dataclass
class Case:
    """One door of one model."""

    model: str
    door: str
    gbytes: float
    layers: int
    closed_s: list[float] = field(default_factory=list)
    """From the pause until the engine runs again."""
    load_s: list[float] = field(default_factory=list)
    """Of it, the load alone."""
    stage_s: list[float] = field(default_factory=list)
    """Before it, while the engine served."""
    limit_s: float = 0.0
    """Reading and writing the bytes once, at the speed of a device-to-device copy in the same run."""
    copies: int | None = None
    no_plan: str | None = None


def write_version(model: ServedModel, config: ServiceConfig, folder: Path) -> Manifest:
    """A version of random weights, quantized on the GPU, as the ingest lays it out."""
    plan = model.plan(config.quant)
    recipe = TrainerRecipe(
        weights="fp8_block",
        quantized=tuple(plan.quantized),
        keep_float32=tuple(model.keep_float32),
        experts=model.experts,
    )
    folder.mkdir(parents=True)
    writer = VersionWriter(folder, Converter(recipe).slots(model.shapes))
    quantizer = Quantizer()
    for name, shape in model.shapes.items():
        weight = gaussian(shape)
        if name in plan.quantized:
            [(codes, scales)] = quantizer.quantize([(name, weight)], to_cpu=True)
            writer.write(name, tensor_bytes(codes))
            writer.write(f"{name}_scale_inv", tensor_bytes(scales))
        else:
            kept = weight.float() if name in model.keep_float32 else weight
            writer.write(name, tensor_bytes(kept.cpu()))
    manifest = Manifest(
        version=1, fingerprint=model.fingerprint, recipe=Recipe(weights="fp8_block"), tensors=writer.finish()
    )
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json())
    torch.cuda.empty_cache()
    return manifest


@asynccontextmanager
async def engine(config: ServiceConfig, model: ServedModel) -> AsyncIterator[EngineAdapter]:
    """An engine with the service's arguments."""
    args = engine_args(config, not_converted(model, model.plan(config.quant)), has_tokenizer=False)
    adapter = EngineAdapter(args)
    try:
        await adapter.connect()
        yield adapter
    finally:
        adapter.shutdown()


def load(adapter: EngineAdapter, concurrent: int) -> AbstractAsyncContextManager[None]:
    """So many rollouts at any time."""
    sampling, turns = Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True), itertools.count()

    def request(number: int) -> Awaitable[object]:
        prompt = tuple(range(number + 10, number + 10 + PROMPT_TOKENS))
        return adapter.generate(f"{number}-{next(turns)}", prompt, sampling)

    return busy(concurrent, request)


async def update(adapter: EngineAdapter, folder: Path, version: int, case: Case) -> None:
    """One, as a replica does it."""
    started = time.perf_counter()
    await adapter.stage(folder)
    closed = time.perf_counter()
    await adapter.pause("keep")
    load_s = await adapter.load(folder, version)
    await adapter.resume()
    case.closed_s.append(time.perf_counter() - closed)
    case.load_s.append(load_s)
    case.stage_s.append(closed - started)


async def report(adapter: EngineAdapter) -> dict[str, Any]:
    """How the last version was loaded."""
    [answer] = await adapter.ask_workers("load_report")
    return dict(answer)


async def measure(config: ServiceConfig, folder: Path, cases: dict[str, Case], repeats: int, concurrent: int) -> None:
    """The doors of one kind of staging."""
    model = ServedModel.load(config.model.path)
    version = 0
    async with engine(config, model) as adapter:
        for door, case in cases.items():
            await adapter.ask_workers("plan_loads", door != "native")
            await update(adapter, folder, version := version + 1, Case("", "", 0, 0))  # the first warms up, and teaches
            async with load(adapter, concurrent):
                await asyncio.sleep(1.0)
                for _ in range(repeats):
                    await update(adapter, folder, version := version + 1, case)
                    await asyncio.sleep(0.3)
            last = await report(adapter)
            case.copies, case.no_plan = last.get("copies"), last.get("no_plan")


def copy_limit_s(nbytes: int) -> float:
    """Seconds to read and write so many bytes once, at the speed of a large device-to-device copy."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target, seconds = torch.empty_like(source), []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    del source, target
    torch.cuda.empty_cache()
    return statistics.median(seconds) * nbytes / (4 << 30)


def configs(model: Path, eager: bool, doors: list[str]) -> Iterator[tuple[ServiceConfig, tuple[str, ...]]]:
    """One engine for each kind of staging, and the doors that are measured with it."""
    for staging, offered in (("device", ("native", "device")), ("host", ("host",)), ("none", ("files",))):
        wanted = tuple(door for door in offered if door in doors)
        if not wanted:
            continue
        settings = {
            "model": {"path": model},
            "engine": {
                "max_model_len": 1024,
                "linear_backend": "cutlass",
                "staging": staging,
                "enforce_eager": eager,
                "gpu_memory_utilization": 0.85,
            },
        }
        yield ServiceConfig.model_validate(settings), wanted


def table_of(cases: list[Case]) -> Table:
    """For people."""
    table = Table(title=f"seconds closed for a full update on {results.machine()}")
    for column in ("model", "door", "GB", "staged", "closed", "of it loading", "limit", "copies"):
        table.add_column(column, justify="left" if column in ("model", "door") else "right")
    for c in cases:
        seconds = [f"{statistics.median(values):.4f}" for values in (c.stage_s, c.closed_s, c.load_s)]
        table.add_row(
            c.model, c.door, f"{c.gbytes:.2f}", *seconds, f"{c.limit_s:.4f}", str(c.copies or c.no_plan or "")
        )
    return table


def main(
    model: Annotated[list[str] | None, typer.Option(help="qwen3-8b or qwen3-30b-a3b; may be repeated.")] = None,
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the published model.")] = None,
    door: Annotated[list[str] | None, typer.Option(help="native, device, host or files; may be repeated.")] = None,
    repeats: int = 5,
    concurrent: int = 64,
    eager: Annotated[bool, typer.Option(help="No torch.compile and no CUDA graphs: engines start sooner.")] = False,
    folder: Annotated[Path, typer.Option(help="Where versions are put.")] = Path("/dev/shm"),
) -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/update.json."""
    console, cases = Console(), []
    register()
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for shape in model or ["qwen3-8b"]:
            path = write_config(shape, Path(name) / shape, layers)
            served, version = ServedModel.load(path), Path(name) / f"{shape}-version"
            for config, doors in configs(path, eager, door or DOORS):
                os.environ.update(engine_environment(config))  # noqa: TID251 - the engine's parent is this process
                if not version.exists():
                    manifest = write_version(served, config, version)
                    limit_s = copy_limit_s(manifest.total_bytes)
                    console.log(f"{shape}: wrote {manifest.total_bytes / 1e9:.2f} GB")
                found = {d: Case(shape, d, manifest.total_bytes / 1e9, layers or 0, limit_s=limit_s) for d in doors}
                asyncio.run(measure(config, version, found, repeats, concurrent))
                cases += found.values()
                for case in found.values():
                    console.log(f"{shape} {case.door}: closed {case.closed_s} load {case.load_s} {case.no_plan or ''}")
    console.print(table_of(cases))
    content = {"concurrent": concurrent, "eager": eager, "cases": [asdict(case) for case in cases]}
    console.print(f"wrote {results.write('update', content)}")


if __name__ == "__main__":
    typer.run(main)
