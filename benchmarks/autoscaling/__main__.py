"""The CPU deployment grows from one replica to two and shrinks back, under a trainer's bursts of rollouts.

    python -m benchmarks.autoscaling

A step is a burst of rollouts, then silence while "the trainer steps", then a push; one more push comes in the middle of
a burst. A few long generations are always under way, also while a replica is removed. Writes
``benchmarks/results/<machine>/autoscaling.json`` and ``docs/autoscaling.png``; ``--plot-only`` draws the latter again.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ray import serve
from rich.console import Console
from safetensors.torch import load_file

from benchmarks.autoscaling.plot import draw
from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.gpu_service import serving_tiny_model
from benchmarks.common.paths import PROJECT
from rollout_service.client import RolloutClient
from rollout_service.local import APPLICATION

PLOT = PROJECT / "docs/autoscaling.png"

SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_sequences": 64,
    "upscale_delay_s": 5,
    "downscale_delay_s": 40,
    "drain_timeout_s": 600,
}
LONG_TOKENS, LONG_AT_ONCE = 1500, 3
BURST = {"prompts": 30, "n": 4, "max_tokens": 192}
TRAINER_STEP_S = 12
SAMPLE_S = 1.0
UP = frozenset({"RUNNING"})
COMING = frozenset({"STARTING", "UPDATING", "RECOVERING"})

console = Console()


@dataclass
class Record:
    """What happened, on one clock."""

    began: float = field(default_factory=time.monotonic)
    samples: list[dict[str, Any]] = field(default_factory=list)
    bursts: list[tuple[float, float]] = field(default_factory=list)
    pushes: list[dict[str, float]] = field(default_factory=list)
    answered: dict[str, int] = field(default_factory=lambda: {"burst": 0, "long": 0})
    stale_rollouts: int = 0
    """Rollouts with a token of an older version than the one that was live everywhere when they were sent."""

    def now(self) -> float:
        """Seconds since the beginning."""
        return round(time.monotonic() - self.began, 2)

    def say(self, text: str) -> None:
        """Print a line with the time."""
        console.print(f"{self.now():6.1f} s  {text}", highlight=False)


def replica_counts() -> tuple[int, int, int]:
    """Replicas of the engine that run, that are on their way, and that finish their rollouts before they go."""
    states = serve.status().applications[APPLICATION].deployments["engine"].replica_states
    counts = {getattr(state, "value", state): number for state, number in states.items()}
    return (
        sum(counts.get(state, 0) for state in UP),
        sum(counts.get(state, 0) for state in COMING),
        counts.get("STOPPING", 0),
    )


async def watch(client: RolloutClient, record: Record) -> None:
    """Sample Serve's replicas and the service's own table of them, for ever."""
    before: tuple[int, int, int] | None = None
    while True:
        counts = await asyncio.to_thread(replica_counts)
        fleet = await client.fleet()
        running, coming, draining = counts
        record.samples.append(
            {
                "t_s": record.now(),
                "running": running,
                "wanted": running + coming,
                "draining": draining,
                "sequences": {replica.replica_id: replica.running for replica in fleet.replicas},
                "versions": {replica.replica_id: replica.version for replica in fleet.replicas},
                "latest_version": fleet.latest_version,
            }
        )
        if counts != before:
            record.say(f"replicas: {running} running, {coming} starting, {draining} draining")
        before = counts
        await asyncio.sleep(SAMPLE_S)


class Trainer:
    """Sends rollouts and pushes versions, and checks what comes back."""

    def __init__(self, client: RolloutClient, model: Path, record: Record) -> None:
        self._client, self._record = client, record
        self._weights = load_file(model / "model.safetensors")
        self._generator = torch.Generator().manual_seed(0)
        self.version = 0

    async def burst(self) -> None:
        """Many short rollouts at once."""
        started, live = self._record.now(), self.version
        prompts = torch.randint(6, 100, (BURST["prompts"], 32), generator=self._generator).tolist()
        rollouts = await self._client.generate_batch(
            prompts, n=BURST["n"], max_tokens=BURST["max_tokens"], ignore_eos=True
        )
        self._record.bursts.append((started, self._record.now()))
        self._count("burst", live, rollouts)
        by = {rollout.replica_id for rollout in rollouts}
        self._record.say(f"burst of {len(prompts) * BURST['n']} sequences answered by {len(by)} replica(s)")

    async def push(self) -> None:
        """The next version, until every live replica serves it."""
        started = self._record.now()
        await self._client.push_weights(self.version + 1, self._weights)
        self.version += 1
        self._record.pushes.append({"version": self.version, "from_s": started, "to_s": self._record.now()})
        self._record.say(f"version {self.version} is live everywhere after {self._record.now() - started:.1f} s")

    async def long_ones(self) -> None:
        """One long generation after the other, for ever."""
        while True:
            live = self.version
            rollout = await self._client.generate([5, 6, 7], max_tokens=LONG_TOKENS, ignore_eos=True)
            self._count("long", live, [rollout])

    def _count(self, kind: str, live: int, rollouts: list[Any]) -> None:
        self._record.answered[kind] += len(rollouts)
        self._record.stale_rollouts += sum(min(r.completions[0].versions) < live for r in rollouts)


@asynccontextmanager
async def beside(*coroutines: Any) -> AsyncIterator[None]:
    """Run them until the block ends; an error in one of them is raised there."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
        yield
        for task in tasks:
            task.cancel()


async def until(record: Record, wanted: int) -> None:
    """Wait until so many replicas run and none is coming or going."""
    while not record.samples or [record.samples[-1][key] for key in ("running", "wanted", "draining")] != [
        wanted,
        wanted,
        0,
    ]:
        await asyncio.sleep(SAMPLE_S)


async def play(url: str, model: Path) -> Record:
    """1 → 2 → 1: steps until there are two replicas, two more steps, then silence until there is one again."""
    record = Record()
    async with RolloutClient(url) as client:
        trainer = Trainer(client, model, record)
        long_ones = [trainer.long_ones() for _ in range(LONG_AT_ONCE)]
        async with beside(watch(client, record), *long_ones):
            await until(record, 1)
            await asyncio.sleep(15)
            steps_with_two = 0
            while steps_with_two < 2:
                steps_with_two += record.samples[-1]["running"] == 2
                if steps_with_two == 2:
                    await asyncio.gather(trainer.burst(), _later(3.0, trainer.push))
                else:
                    await trainer.burst()
                await asyncio.sleep(TRAINER_STEP_S)
                await trainer.push()
            record.say("silence but for the long generations")
            await until(record, 1)
            await trainer.push()
            await asyncio.sleep(15)
    return record


async def _later(seconds: float, act: Any) -> None:
    await asyncio.sleep(seconds)
    await act()


def main(plot_only: bool = False) -> None:
    """Play, write the JSON, draw the plot."""
    path = results.path("autoscaling")
    if not plot_only:
        console.print("starting the service with one engine")
        weights = {"poll_s": 1.0, "dead_after_s": 5.0}
        with serving_tiny_model(engine={"max_model_len": 2048}, scaling=SCALING, weights=weights) as service:
            record = asyncio.run(play(service.url, service.config.model.path))
        content = {key: value for key, value in vars(record).items() if key != "began"}
        shape = {"burst": BURST, "long": {"max_tokens": LONG_TOKENS, "at_once": LONG_AT_ONCE}}
        path = results.write("autoscaling", {"scaling": SCALING, "shape": shape, **content})
        console.print(f"answered {record.answered}, stale rollouts {record.stale_rollouts}; {path}", soft_wrap=True)
    draw(json.loads(path.read_text()), PLOT)
    console.print(f"{PLOT}", soft_wrap=True)


if __name__ == "__main__":
    run(main)
