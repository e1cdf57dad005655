"""SIGTERM to every process of ours, the end of the only engine, and autoscaling while weights move and rollouts run."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import psutil

from benchmarks.faults.ground import PROCESSES, WAIT_S, Case, Ground, ground, processes, until
from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError
from tests.support.processes import alive, descendants

PROBE_S = 0.1
MORE_S = 5.0  # the time without service may be longer than an engine's start by this much
SCALING = {
    "max_replicas": 2,
    "target_sequences": 8,
    "upscale_delay_s": 0,
    "downscale_delay_s": 5,
    "drain_timeout_s": 60,
}
alone, autoscaled = partial(ground, replicas=1), partial(ground, replicas=1, scaling=SCALING)
LITTLE_LOAD = 4  # one replica is enough for it, and not for the load of the other cases


def term_cases() -> Iterator[Case]:
    """Yield a drain of each kind of process of ours; Serve's controller is started anew instead."""
    for victim in ("replica", "ingest", "gateway", "monitor", "controller"):
        yield Case(f"SIGTERM {victim}, generating", partial(ends, victim))


def fleet_cases() -> Iterator[Case]:
    """Yield the end of the only engine, and autoscaling; scaling down starts with the replica that scaling up made."""
    yield Case("SIGTERM the only replica, generating", partial(only_one_ends, signal.SIGTERM), ground=alone)
    yield Case("kill the only replica, generating", partial(only_one_ends, signal.SIGKILL), ground=alone)
    yield Case("scale-up from 1 to 2 replicas during updates", up_while_updating, ground=autoscaled)
    yield Case("scale-down from 2 to 1 replicas under load", down_under_load, LITTLE_LOAD, ground=autoscaled)


async def ends(victim: str, ground: Ground) -> None:
    """Send SIGTERM to one process: it ends with all its children, and a version pushed meanwhile is committed."""
    process, known = processes(victim)[0], await ground.replica_ids()
    family = [process, *process.children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    ground.killed(victim, process, known)
    struck = time.perf_counter()
    if victim == "replica":
        await ground.until_fleet(lambda fleet: any(r.state == "draining" for r in fleet.replicas), "drains")
        ground.note("the fleet said that it drains")
    await ground.push(ground.committed + 1, wait="all")
    await _gone(family)
    ground.note(f"{len(family)} processes were gone after {time.perf_counter() - struck:.1f} s")


async def only_one_ends(sign: signal.Signals, ground: Ground) -> None:
    """End the only engine: nobody is served until another one has started, and ``MORE_S`` longer at most."""
    replica, known = processes("replica")[0], await ground.replica_ids()
    family = [replica, *replica.children(recursive=True)]
    async with _probed(ground) as answered:
        struck = time.time()
        replica.send_signal(sign)
        ground.killed("replica", replica, known)
        begun = max(struck, await until(lambda: _successor_begins(replica), "another replica is started"))
        await ground.until_fleet(
            lambda fleet: any(r.state == "ready" and r.replica_id not in known for r in fleet.replicas)
        )
        since = time.time()
        while not answered or answered[-1] < since:
            await asyncio.sleep(PROBE_S)
    times = [time for time in answered if time >= struck]
    gaps = [(after - before, after) for before, after in zip([struck, *times], times, strict=False)]
    ground.outage_s, served = max(gaps)
    ground.engine_start_s = served - begun
    await _gone(family)
    told = f"nobody was served for {ground.outage_s:.1f} s, an engine starts in {ground.engine_start_s:.1f} s"
    ground.note(told)
    assert ground.outage_s <= ground.engine_start_s + MORE_S, told


async def _successor_begins(before: psutil.Process) -> float | None:
    """Return when the next replica's process was made. Ray may have had it ready before."""
    with contextlib.suppress(LookupError, psutil.NoSuchProcess):
        return next((each.create_time() for each in processes("replica") if each.pid != before.pid), None)
    return None


@asynccontextmanager
async def _probed(ground: Ground) -> AsyncIterator[list[float]]:
    """Send a small request every ``PROBE_S``, each on its own; yield the times of their answers."""
    answered: list[float] = []

    async def ask(client: RolloutClient) -> None:
        with contextlib.suppress(RolloutServiceError, httpx.TransportError):
            await client.generate([5, 6], max_tokens=1)
            answered.append(time.time())

    async def go_on(client: RolloutClient, asking: asyncio.TaskGroup) -> None:
        while True:
            asking.create_task(ask(client))
            await asyncio.sleep(PROBE_S)

    async with RolloutClient(ground.service.url, retries=0) as client, asyncio.TaskGroup() as asking:
        going = asyncio.create_task(go_on(client, asking))
        try:
            while not answered:
                await asyncio.sleep(PROBE_S)
            yield answered
        finally:
            going.cancel()


async def _gone(family: list[psutil.Process]) -> None:
    """Wait until every process has ended. Some may still be waited for by their parents."""

    async def look() -> bool:
        return not any(alive(process) for process in family)

    await until(look, f"processes {[process.pid for process in family]} have ended")


async def up_while_updating(ground: Ground) -> None:
    """Commit versions from the start of the second replica's process until the fleet has it."""
    (first,) = await ground.replica_ids()
    async with asyncio.timeout(WAIT_S):
        while len(descendants(PROCESSES["replica"])) < 2:
            await asyncio.sleep(0.2)
        ground.replicas, begun = 2, ground.committed
        while not any(r.state == "ready" for r in (await ground.client.fleet()).replicas if r.replica_id != first):
            await ground.push(ground.committed + 1, wait="none")
            await asyncio.sleep(1)
    ground.note(f"{ground.committed - begun} versions were committed while the second replica started")


async def down_under_load(ground: Ground) -> None:
    """Keep few rollouts under way while a replica is taken from among them."""
    before = await ground.replica_ids()
    fleet = await ground.until_fleet(lambda fleet: len(fleet.replicas) == 1, "has one replica")
    ground.replicas = 1
    ground.note(f"from {len(before)} to {len(fleet.replicas)} replicas with {fleet.replicas[0].running} sequences")
    await ground.push(ground.committed + 1, wait="none")
