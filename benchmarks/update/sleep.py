"""Seconds until engines sleep and serve again, and the GPU memory that they give back; through the whole service.

    python -m benchmarks.update.sleep [--model qwen3-8b]

Random weights of a published shape, one replica as shipped, no rollouts under way. Each round puts the engines to
sleep, commits a version by ``path`` while they sleep in every second one, and wakes them: ``wake_s`` is from the call
until it is answered, which is when every replica serves the newest version.

Memory is what the GPU has in use beyond what it had before the service started: the ingest's is in it.
"""

import asyncio
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.paths import SHARED_MEMORY
from benchmarks.common.shipped_service import ServedOptions, shipped_service
from rollout_service.client import RolloutClient

RESULT = "update_sleep"
SAME = ("model",)
ROUNDS = 6  # every second one commits a version while the engines sleep


@dataclass
class Case:
    """One model."""

    model: str
    awake_gib: float = 0.0
    asleep_gib: list[float] = field(default_factory=list)
    sleep_s: list[float] = field(default_factory=list)
    wake_s: list[float] = field(default_factory=list)  # to the version that was served before
    wake_to_new_s: list[float] = field(default_factory=list)  # to one that was committed meanwhile


def gib_in_use() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


async def measure(url: str, folder: Path, case: Case, before_gib: float) -> None:
    """Measure all rounds. Version 1 teaches the service the load plan that later ones are loaded by."""
    async with RolloutClient(url) as client:
        newest = 1
        await client.push_path(newest, folder)
        await client.generate([1, 2, 3], max_tokens=16, ignore_eos=True)
        case.awake_gib = gib_in_use() - before_gib
        for number in range(ROUNDS):
            started = time.perf_counter()
            await client.sleep()
            case.sleep_s.append(time.perf_counter() - started)
            case.asleep_gib.append(gib_in_use() - before_gib)
            if number % 2:
                newest += 1
                status = await client.push_path(newest, folder, wait="none")
                if status.state != "committed":
                    raise RuntimeError(f"version {newest} is {status.state} while the engines sleep")
            started = time.perf_counter()
            await client.wake_up()
            (case.wake_to_new_s if number % 2 else case.wake_s).append(time.perf_counter() - started)
            rollout = await client.generate([1, 2, 3], max_tokens=16, ignore_eos=True)
            if {span.version for c in rollout.completions for span in c.spans} != {newest}:
                raise RuntimeError(f"woken engines serve {rollout.completions[0].spans}, not version {newest}")


def main(asked: ServedOptions) -> None:
    """Measure, and add the case to benchmarks/results/<machine>/update_sleep.json."""
    model, before_gib = asked.model_folder(), gib_in_use()
    case = Case(asked.model)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as log:  # the shipped log has an earlier run's versions
        engine, weights = {"enable_sleep_mode": True}, {"source_roots": [str(model)], "root": log}
        with shipped_service(asked, "1", engine=engine, weights=weights) as (url, _):
            asyncio.run(measure(url, model, case, before_gib))
    results.add(RESULT, [asdict(case)], SAME)


if __name__ == "__main__":
    run(main)
