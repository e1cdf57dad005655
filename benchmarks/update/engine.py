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
from collections.abc import Awaitable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

import torch

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine, commit, load_version
from benchmarks.common.gpu_service import ModelOptions
from benchmarks.common.paths import SHARED_MEMORY
from benchmarks.common.shapes import Shape
from benchmarks.common.timing import copy_seconds
from benchmarks.update.busy import busy
from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.worker import VersionStaging
from rollout_service.protocol.sampling import Sampling
from rollout_service.store.log import WeightLog

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


@dataclass
class Case:
    """One way with one model."""

    model: str
    way: str
    gbytes: float
    eager: bool = True  # without torch.compile and CUDA graphs, which an update does not touch, engines start sooner
    concurrent: int = CONCURRENT
    closed_s: list[float] = field(default_factory=list)  # from the pause until the engine runs again
    load_s: list[float] = field(default_factory=list)  # of it, the load alone
    limit_s: float = 0.0  # reading and writing the bytes once, at the speed of a device-to-device copy in the same run
    no_plan: str | None = None


def load(adapter: EngineAdapter) -> AbstractAsyncContextManager[None]:
    sampling, turns = Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True), itertools.count()

    def request(number: int) -> Awaitable[object]:
        prompt = tuple(range(number + 10, number + 10 + PROMPT_TOKENS))
        return adapter.generate(f"{number}-{next(turns)}", prompt, sampling)

    return busy(CONCURRENT, request)


async def measure(config: ServiceConfig, folder: Path, cases: list[Case], repeats: int) -> None:
    """The ways of one kind of staging."""
    versions = itertools.count(1)
    async with bare_engine(config, arguments={"worker_extension_cls": WORKER}) as adapter:
        for case in cases:
            await adapter.ask_workers("allow_plans", case.way != Way.NATIVE)
            await load_version(adapter, folder, next(versions))  # the first warms up, and teaches
            async with load(adapter):
                await asyncio.sleep(1.0)
                for _ in range(repeats):
                    closed_s, load_s = await load_version(adapter, folder, next(versions))
                    case.closed_s.append(closed_s)
                    case.load_s.append(load_s)
                    await asyncio.sleep(0.3)
            [last] = await adapter.ask_workers("load_report")
            case.no_plan = last.get("no_plan")


def copy_limit_s(nbytes: int) -> float:
    """Seconds to read and write so many bytes once, at the speed of a large device-to-device copy."""
    seconds = copy_seconds(COPY_BYTES, "cuda", 5) * nbytes / COPY_BYTES
    torch.cuda.empty_cache()
    return seconds


def config_of(model: Path, log: Path, staging: str) -> ServiceConfig:
    engine = {"max_model_len": 1024, "staging": staging, "enforce_eager": True, "gpu_memory_utilization": 0.85}
    weights = {"root": log, "source_roots": [model]}
    return ServiceConfig.model_validate({"model": {"path": model}, "engine": engine, "weights": weights})


def measure_model(shape: Shape, repeats: int, log: Path) -> Iterator[Case]:
    """Measure all ways with one model, each kind of staging with an engine of its own."""
    path = ModelOptions(model=shape).model_folder()
    version = asyncio.run(commit(config_of(path, log, "none")))
    torch.cuda.empty_cache()
    nbytes = WeightLog(log).manifest(version).total_bytes
    limit_s = copy_limit_s(nbytes)
    for staging, ways in OFFERED.items():
        cases = [Case(shape, way, nbytes / 1e9, limit_s=limit_s) for way in ways]
        asyncio.run(measure(config_of(path, log, staging), WeightLog(log).folder(version), cases, repeats))
        yield from cases


def main(options: UpdateOptions) -> None:
    """Measure, and add the cases to benchmarks/results/<machine>/update_engine.json."""
    for shape in options.model:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
            for case in measure_model(shape, options.repeats, Path(folder)):
                results.add(RESULT, [asdict(case)], SAME)


if __name__ == "__main__":
    run(main)
