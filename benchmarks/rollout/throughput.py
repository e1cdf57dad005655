"""Tokens/s of the service over HTTP against the bare vLLM engine inside; on a GPU.

    python -m benchmarks.rollout.throughput --model qwen3-8b --mode fp8kv --side bare --side http
    python -m benchmarks.rollout.throughput --mode bf16 --mode fp8kv --side bare --envelope-gb 80 --groups 256 --n 1

Random weights of published shapes. All sides have the engine arguments that the service makes of one configuration, and
the same prompts: ``--groups`` distinct ones with ``--n`` completions each, all at once, temperature 1, no end of
sequence. ``--envelope-gb`` is all the GPU memory that an engine may use. Modes: ``bf16``, ``fp8`` (weights), ``fp8kv``
(weights and KV cache). The service's engine and the bare one live side by side and take turns: what drifts on a host
drifts for both. The bare one gets the version that the service serves; alone it runs on vLLM's dummy weights. Before
each run comes one with an eighth of the tokens: two lengths tell what a step takes and what does not depend on them.
``--tail 1 --tail 16`` adds runs of so few sequences, as at the end of a batch. Each call adds its cases to the same
file.
"""

import asyncio
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.engine import bare_engine, load_version
from benchmarks.common.gpu_service import (
    ENGINES_SHARE,
    EngineOptions,
    Mode,
    ModelOptions,
    Settings,
    fitting,
    serving,
    settings_of,
)
from benchmarks.common.paths import SHARED_MEMORY
from benchmarks.common.shapes import Shape, write_config
from benchmarks.common.work import Case, Generate, WorkOptions, take_turns
from rollout_service.client import RolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from rollout_service.store.log import WeightLog

RESULT = "rollout_throughput"
SAME = ("model", "mode", "side", "envelope_gb", "work", "engine")


class Side(StrEnum):
    """Where tokens are asked for."""

    BARE = "bare"
    HTTP = "http"


class SideOptions(Options):
    """What is compared."""

    mode: tuple[Mode, ...] = (Mode.FP8KV,)
    """May be repeated."""
    side: tuple[Side, ...] = tuple(Side)
    """May be repeated."""
    repeats: int = 3
    """Whole runs of each side."""
    tail: tuple[int, ...] = ()
    """Sequences of further runs, each with a prompt of its own. May be repeated."""
    envelope_gb: float | None = None
    """All the GPU memory that an engine may use."""
    service_share: float = 0.5
    """The service's part of the memory of both engines."""

    @property
    def both(self) -> bool:
        return Side.BARE in self.side and len(set(self.side)) > 1

    def memory_share(self, of_all: float) -> float:
        """Return one engine's share of the GPU's memory: the envelope, or that much ``of_all`` that engines have."""
        if self.envelope_gb is not None:
            return round(self.envelope_gb / (torch.cuda.get_device_properties(0).total_memory / 1e9), 4)
        return round(ENGINES_SHARE * of_all, 4)


Load = tuple[WorkOptions, dict[str, Case]]
"""Some work, and each side's figures with it."""


async def measure(
    settings: Settings, loads: list[Load], sides: SideOptions, common: dict[str, Any], folder: Path
) -> None:
    """Measure one mode of one model. ``common``: fields that the result gives every case."""
    config, ways, started = ServiceConfig.model_validate(settings), dict[str, Generate](), time.perf_counter()
    async with AsyncExitStack() as stack:
        if Side.HTTP in sides.side:
            service = stack.enter_context(serving(settings, folder))
            for _, cases in loads:
                cases[Side.HTTP].start_s = time.perf_counter() - started
            ways[Side.HTTP] = over_http(await stack.enter_async_context(RolloutClient(service.url)))
            # without an area for versions that never come, two large models fit on a GPU
            share = sides.memory_share(1 - sides.service_share)
            beside = service.config.engine.model_copy(update={"gpu_memory_utilization": share, "staging": "none"})
            config = service.config.model_copy(update={"engine": beside})
        if Side.BARE in sides.side:
            own = [cases[Side.BARE] for _, cases in loads]
            ways[Side.BARE] = await stack.enter_async_context(bare(config, own))
        for number, (work, cases) in enumerate(loads):  # other prompts than before, which the prefix cache has
            await take_turns(work.make(seed=number), sides.repeats, {side: ways[side] for side in cases}, cases)
            found = [case.as_json() | common | {"work": work.as_json()} for case in cases.values()]
            results.add(RESULT, found, SAME)


@asynccontextmanager
async def bare(config: ServiceConfig, cases: list[Case]) -> AsyncIterator[Generate]:
    """The engine alone, with the version that the service has left in the log, or with dummy weights."""
    started = time.perf_counter()
    async with bare_engine(config) as engine:
        start_s = time.perf_counter() - started
        log = WeightLog(config.weights.root_here())
        head = log.head()
        if head is None:
            await engine.label(0)  # the dummy weights' label is no version
        else:
            await load_version(engine, log.folder(head.version), head.version)
        for case in cases:
            case.start_s, case.kv_tokens = start_s, engine.kv_cache_tokens
        yield lambda prompt, how: engine.generate(uuid.uuid4().hex, tuple(prompt), how)


def over_http(client: RolloutClient) -> Generate:
    """The service, as a trainer asks it."""

    async def generate(prompt: list[int], how: Sampling) -> Iterable[Completion]:
        asked = how.model_dump(include={"n", "max_tokens", "ignore_eos"})
        return (await client.generate(prompt, **asked)).completions

    return generate


def main(model: ModelOptions, sides: SideOptions, work: WorkOptions, engine: EngineOptions) -> None:
    """Measure, and add the cases to benchmarks/results/<machine>/rollout_throughput.json."""
    engine_settings = engine.settings(work.sequences)
    common = {
        "run": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine": engine_settings,
        "service_share": sides.service_share if sides.both else None,
    }
    share = sides.memory_share(sides.service_share if sides.both else 1.0)
    sizes = [work, *(work.model_copy(update={"groups": size, "n": 1}) for size in sides.tail)]
    measured = [side for side in Side if side in sides.side]
    path = write_config(Shape(model.model), model.folder / model.model)
    if Side.HTTP in sides.side:
        path = model.model_folder()
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        for mode in sides.mode:
            section = fitting(work) | engine_settings | {"gpu_memory_utilization": share}
            settings = settings_of(mode, path, Path(folder), section)
            loads = [
                (size, {side.value: Case(model.model, mode, side, sides.envelope_gb) for side in measured})
                for size in sizes
            ]
            asyncio.run(measure(settings, loads, sides, common, Path(folder)))


if __name__ == "__main__":
    run(main)
