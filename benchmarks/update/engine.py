"""How long an engine is closed for a full update of published shapes, in our ways and by vLLM's own reload.

    python -m benchmarks.update.engine [--model qwen3-8b] [--model qwen3-30b-a3b]

Random weights in FP8 and a GPU. Each way loads the same version from memory into an engine that generates 64 rollouts
all the while: *closed* is from the pause until it runs again.

- ``native``: vLLM's layerwise reload, all tensors on the GPU before it closes;
- ``device``: our load plan, from the same staging area on the GPU;
- ``host``: our load plan, from pinned host memory.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

import torch

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine
from benchmarks.common.paths import SHARED_MEMORY
from benchmarks.common.shapes import Shape, gaussian, write_config
from benchmarks.common.timing import copy_seconds
from benchmarks.update.busy import busy
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.worker import VersionStaging
from rollout_service.model.convert import Converter, tensor_bytes
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.quantizer import Quantizer
from rollout_service.store.layout import Layout
from rollout_service.store.manifest import MANIFEST_FILE, Manifest, Recipe
from rollout_service.store.writer import VersionWriter

RESULT = "update_engine"
SAME = ("model", "way", "eager", "concurrent")
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 400
COPY_BYTES = 4 << 30
CONCURRENT = 64  # rollouts that run meanwhile


class Way(StrEnum):
    """How a version gets into the engine."""

    NATIVE = "native"
    DEVICE = "device"
    HOST = "host"


OFFERED = {"device": (Way.NATIVE, Way.DEVICE), "host": (Way.HOST,)}
"""``engine.staging`` → the ways that an engine with it has."""


WORKER = "benchmarks.update.engine.ForEachWay"


class ForEachWay(VersionStaging):
    """What is mixed into vLLM's workers here."""

    def allow_plans(self, allowed: bool) -> None:
        """Or load every version layerwise."""
        self.weight_transfer_engine.may_plan = allowed


class UpdateOptions(Options):
    """The updates."""

    model: tuple[Shape, ...] = (Shape.QWEN3_8B,)
    """Whose shapes; may be repeated."""
    repeats: int = 5
    """Versions in each way."""
    eager: bool = False
    """No torch.compile and no CUDA graphs: engines start sooner."""


@dataclass
class Case:
    """One way with one model."""

    model: str
    way: str
    gbytes: float
    eager: bool
    concurrent: int = CONCURRENT
    closed_s: list[float] = field(default_factory=list)  # from the pause until the engine runs again
    load_s: list[float] = field(default_factory=list)  # of it, the load alone
    limit_s: float = 0.0  # reading and writing the bytes once, at the speed of a device-to-device copy in the same run
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
    writer = VersionWriter(folder, Layout(Converter(recipe).slots(model.shapes)))
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
    (folder / MANIFEST_FILE).write_bytes(manifest.to_json())
    torch.cuda.empty_cache()
    return manifest


def load(adapter: EngineAdapter) -> AbstractAsyncContextManager[None]:
    sampling, turns = Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True), itertools.count()

    def request(number: int) -> Awaitable[object]:
        prompt = tuple(range(number + 10, number + 10 + PROMPT_TOKENS))
        return adapter.generate(f"{number}-{next(turns)}", prompt, sampling)

    return busy(CONCURRENT, request)


async def update(adapter: EngineAdapter, folder: Path, version: int, case: Case | None = None) -> None:
    """Load one version as a replica does it, and note the seconds in ``case``."""
    await adapter.stage(folder)
    closed = time.perf_counter()
    await adapter.pause("keep")
    load_s = await adapter.load(folder, version)
    await adapter.resume()
    if case is not None:
        case.closed_s.append(time.perf_counter() - closed)
        case.load_s.append(load_s)


async def measure(config: ServiceConfig, folder: Path, cases: list[Case], repeats: int) -> None:
    """The ways of one kind of staging."""
    versions = itertools.count(1)
    async with bare_engine(config, arguments={"worker_extension_cls": WORKER}) as adapter:
        for case in cases:
            await adapter.ask_workers("allow_plans", case.way != Way.NATIVE)
            await update(adapter, folder, next(versions))  # the first warms up, and teaches
            async with load(adapter):
                await asyncio.sleep(1.0)
                for _ in range(repeats):
                    await update(adapter, folder, next(versions), case)
                    await asyncio.sleep(0.3)
            [last] = await adapter.ask_workers("load_report")
            case.no_plan = last.get("no_plan")


def copy_limit_s(nbytes: int) -> float:
    """Seconds to read and write so many bytes once, at the speed of a large device-to-device copy."""
    seconds = copy_seconds(COPY_BYTES, "cuda", 5) * nbytes / COPY_BYTES
    torch.cuda.empty_cache()
    return seconds


def config_of(model: Path, staging: str, eager: bool) -> ServiceConfig:
    engine = {"max_model_len": 1024, "staging": staging, "enforce_eager": eager, "gpu_memory_utilization": 0.85}
    return ServiceConfig.model_validate({"model": {"path": model}, "engine": engine})


def measure_model(shape: Shape, folder: Path, options: UpdateOptions) -> Iterator[Case]:
    """Measure all ways with one model, each kind of staging with an engine of its own."""
    path, version = write_config(shape, folder / shape), folder / f"{shape}-version"
    manifest = write_version(ServedModel.load(path), config_of(path, "none", options.eager), version)
    gbytes, limit_s = manifest.total_bytes / 1e9, copy_limit_s(manifest.total_bytes)
    for staging, ways in OFFERED.items():
        cases = [Case(shape, way, gbytes, options.eager, limit_s=limit_s) for way in ways]
        asyncio.run(measure(config_of(path, staging, options.eager), version, cases, options.repeats))
        yield from cases


def main(options: UpdateOptions) -> None:
    """Measure, and add the cases to benchmarks/results/<machine>/update_engine.json."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        for shape in options.model:
            for case in measure_model(shape, Path(folder), options):
                results.add(RESULT, [asdict(case)], SAME)


if __name__ == "__main__":
    run(main)
