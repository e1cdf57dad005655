"""Tokens/s of one replica and of several, through HTTP; the growth of a fleet under load; and replicas that are killed.

    python -m benchmarks.rollout.fleet --replicas 4

Random weights of a published shape and the shipped settings. Each replica has ``--rollouts`` rollouts under way, so one
with 256 is compared with four that share 1024. Phases, each a case of benchmarks/results/<machine>/rollout_fleet.json:

- ``alone``: a service of one replica;
- ``grow``: a service that may grow from one replica to all of them, under load: the seconds until each is ready, then
  its tokens/s;
- ``kill``: SIGKILL of one of these replicas under load and pushes, ``--kills`` times: what the others did meanwhile,
  the rollouts that failed or had tokens of a version older than the one that was live when they began.

With `--model tiny` it runs on a CPU.
"""

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.processes import raise_at_sigterm
from benchmarks.common.shipped_service import START_LIMIT_S, ServedOptions, shipped_service
from benchmarks.soak.strike import victims
from benchmarks.update.busy import busy
from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError

SAME = ("model", "phase", "replicas", "tensor_parallel", "gpu_share", "rollouts", "prompt_tokens", "output_tokens")
GROUP = 16  # completions of a prompt
Requested = TypeVar("Requested")
LOOK_S = 0.25
KILL_PUSH_S = 5.0  # between two pushes while replicas are killed


class Phase(StrEnum):
    """What is measured."""

    ALONE = "alone"
    GROW = "grow"
    KILL = "kill"


class RolloutOptions(ServedOptions):
    """The service and its load."""

    rollouts: int = 256
    """Under way in each replica, in groups of 16."""
    prompt_tokens: int = 256
    output_tokens: int = 512
    repeats: int = 3
    """Runs of all rollouts; the median counts."""


class FleetOptions(RolloutOptions):
    """The fleet and its load."""

    phase: tuple[Phase, ...] = tuple(Phase)
    """May be repeated. ``kill`` needs ``grow``."""
    replicas: int = 4
    kills: int = 3


@dataclass
class Load:
    """Groups of rollouts that are under way all the time, and what came back."""

    client: RolloutClient
    asked: FleetOptions
    live: int = 0  # the version that every replica serves
    done: list[tuple[float, int]] = field(default_factory=list)  # when a group was answered, and its tokens
    prompts: list[list[int]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    stale: int = 0

    async def group(self, number: int) -> None:
        """Ask for one group, and count its tokens."""
        live = self.live
        try:
            rollout = await self.client.generate(
                self.prompts[number], n=GROUP, max_tokens=self.asked.output_tokens, ignore_eos=True
            )
        except RolloutServiceError as error:
            self.failed.append(repr(error)[:300])
            return
        self.stale += sum(min(completion.versions) < live for completion in rollout.completions)
        self.done.append((time.monotonic(), sum(len(each.token_ids) for each in rollout.completions)))

    def rate(self, since: float, until: float) -> float:
        """Return the tokens/s of the groups that ended in these seconds."""
        return sum(tokens for at, tokens in self.done if since <= at < until) / (until - since)

    def on(self, groups: int) -> AbstractAsyncContextManager[None]:
        """Keep so many groups under way until the block ends; those under way then are waited for."""
        self.prompts = self.asked.prompts(groups, self.asked.prompt_tokens)
        return busy(groups, self.group)


async def rate_of_groups(
    run_group: Callable[[list[int], Requested], Awaitable[int]],
    asked: RolloutOptions,
    replicas: int,
    adapters: Sequence[Requested],
) -> dict[str, Any]:
    """Run all rollouts at once, several times; return the tokens/s."""
    groups = replicas * asked.rollouts // GROUP
    rates = list[float]()
    every = asked.prompts(groups * (asked.repeats + 1), asked.prompt_tokens)
    for repeat in range(asked.repeats + 1):  # the first is a warm-up
        mine = every[repeat * groups : (repeat + 1) * groups]
        started = time.perf_counter()
        tokens = await asyncio.gather(*map(run_group, mine, itertools.cycle(adapters)))
        rates.append(sum(tokens) / (time.perf_counter() - started))
    return {
        "rollouts_at_once": groups * GROUP,
        "tokens_per_s": rates[1:],
        "median_tokens_per_s": statistics.median(rates[1:]),
    }


async def measured_rate(
    client: RolloutClient, asked: RolloutOptions, replicas: int, adapters: Sequence[str | None] = (None,)
) -> dict[str, Any]:
    """Run all rollouts through the service, several times; return the tokens/s and how groups were spread."""
    by_replica = Counter[str]()

    async def run_group(prompt: list[int], adapter: str | None) -> int:
        made = await client.generate(prompt, n=GROUP, max_tokens=asked.output_tokens, ignore_eos=True, adapter=adapter)
        by_replica[made.replica_id] += 1
        return sum(len(completion.token_ids) for completion in made.completions)

    rate = await rate_of_groups(run_group, asked, replicas, adapters)
    return rate | {"groups_by_replica": sorted(by_replica.values())}


async def ready_replicas(client: RolloutClient) -> set[str]:
    return {replica.replica_id for replica in (await client.fleet()).replicas if replica.state == "ready"}


async def grown(client: RolloutClient, asked: FleetOptions) -> dict[str, Any]:
    """Load one replica with the rollouts of all; return the seconds until each other one was ready, and the rate."""
    load, started, ready_s = Load(client, asked), time.monotonic(), list[float]()
    async with load.on(asked.replicas * asked.rollouts // GROUP):
        while len(ready_s) < asked.replicas - 1:
            ready_s += [round(time.monotonic() - started, 1)] * (len(await ready_replicas(client)) - 1 - len(ready_s))
            if time.monotonic() - started > START_LIMIT_S:
                raise RuntimeError(f"the fleet grew to {1 + len(ready_s)} of {asked.replicas} replicas: see serve.log")
            await asyncio.sleep(LOOK_S)
    return {"ready_s": ready_s, "failed": load.failed, **await measured_rate(client, asked, asked.replicas)}


async def killed(client: RolloutClient, asked: FleetOptions, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Kill replicas under load and pushes; return what was lost, what was stale, and the rates around each kill."""
    load, kills = Load(client, asked, live=(await client.fleet()).latest_version or 0), list[dict[str, Any]]()

    async def push_forever() -> None:
        while True:
            status = await client.push_weights("next", weights)
            load.live = status.version
            await asyncio.sleep(KILL_PUSH_S)

    async with load.on(asked.replicas * asked.rollouts // GROUP):
        pushing = asyncio.create_task(push_forever())
        await asyncio.sleep(2 * KILL_PUSH_S)
        for _ in range(asked.kills):
            before, struck = await ready_replicas(client), time.monotonic()
            (await asyncio.to_thread(victims))["replica"][0].kill()
            while not ((now := await ready_replicas(client)) - before and len(now) == asked.replicas):
                if time.monotonic() - struck > START_LIMIT_S:
                    raise RuntimeError("the killed replica was not replaced: see serve.log")
                await asyncio.sleep(LOOK_S)
            back = time.monotonic()
            kills.append(
                {
                    "replaced_s": round(back - struck, 1),
                    "tokens_per_s_before": round(load.rate(struck - 2 * KILL_PUSH_S, struck)),
                    "tokens_per_s_meanwhile": round(load.rate(struck, back)),
                }
            )
            await asyncio.sleep(2 * KILL_PUSH_S)
        pushing.cancel()
        await asyncio.wait([pushing])
        if not pushing.cancelled() and (error := pushing.exception()):
            raise error
    answered = len(load.done) * GROUP
    return {"kills": kills, "answered": answered, "failed": load.failed, "stale": load.stale, "version": load.live}


async def measure(url: str, asked: FleetOptions, model: Path, start: dict[str, Any], phases: set[Phase]) -> None:
    """Run the phases of one service, and write each."""
    async with RolloutClient(url) as client:
        if Phase.ALONE in phases:
            _keep(asked, Phase.ALONE, start | await measured_rate(client, asked, 1))
        if Phase.GROW in phases:
            _keep(asked, Phase.GROW, start | await grown(client, asked))
        if Phase.KILL in phases:
            weights: dict[str, torch.Tensor] = {}
            for file in sorted(model.glob("*.safetensors")):
                weights |= load_file(file)
            _keep(asked, Phase.KILL, await killed(client, asked, weights))


def main(asked: FleetOptions) -> None:
    """Measure all phases."""
    raise_at_sigterm()
    model = asked.model_folder()
    for replicas, phases in (("1", {Phase.ALONE}), (f"1-{asked.replicas}", {Phase.GROW, Phase.KILL})):
        if wanted := phases & set(asked.phase):
            with shipped_service(asked, replicas) as (url, start):
                asyncio.run(measure(url, asked, model, start, wanted))


def _keep(asked: FleetOptions, phase: Phase, case: dict[str, Any]) -> None:
    sizes = asked.model_dump(mode="json", include={*SAME} - {"phase"})
    sizes |= {"phase": phase.value} | ({"replicas": 1} if phase is Phase.ALONE else {})
    results.add("rollout_fleet", [sizes | case], SAME)


if __name__ == "__main__":
    run(main)
