"""SIGTERM to every process of ours, and how long nobody is served when the only engine goes."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.faults.ground import Case, Ground, ground, processes
from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError
from rollout_service.protocol.fleet import Fleet
from tests.support.processes import alive

PROBE_S = 0.1
MORE_S = 5.0
"""The time without service may be longer than an engine's start by this much."""
WAIT_S = 180.0


def term_cases() -> Iterator[Case]:
    """A drain of each kind of process of ours; Serve's controller is started anew instead."""
    for victim in ("replica", "ingest", "gateway", "monitor", "controller"):
        yield Case(f"SIGTERM {victim}, generating", partial(ends, victim))


def only_replica_cases() -> Iterator[Case]:
    """The only engine drained, and killed."""
    yield Case("SIGTERM the only replica, generating", partial(only_one_ends, signal.SIGTERM), ground=alone)
    yield Case("kill the only replica, generating", partial(only_one_ends, signal.SIGKILL), ground=alone)


def alone(folder: Path, **settings: dict[str, Any]) -> AbstractAsyncContextManager[Ground]:
    """A fleet of one."""
    return ground(folder, replicas=1, **settings)


async def ends(victim: str, ground: Ground) -> None:
    """SIGTERM to one process under load: it ends with all its children, and a version pushed meanwhile is committed.

    Raises AssertionError if one of them is left, or a replica that drains does not say so.
    """
    process, known = processes(victim)[0], await ground.replica_ids()
    family = [process, *process.children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    ground.killed(victim, process, known)
    struck = time.perf_counter()
    if victim == "replica":
        await _until(ground, lambda fleet: any(r.state == "draining" for r in fleet.replicas), "says that it drains")
        ground.note("the fleet said that it drains")
    await ground.push(ground.committed + 1, wait="all")
    await _gone(family)
    ground.note(f"{len(family)} processes were gone after {time.perf_counter() - struck:.1f} s")


async def only_one_ends(sign: signal.Signals, ground: Ground) -> None:
    """The only engine goes: nobody is served until another one has started, and ``MORE_S`` longer at most.

    Raises AssertionError if it takes longer.
    """
    replica, known = processes("replica")[0], await ground.replica_ids()
    family = [replica, *replica.children(recursive=True)]
    async with _probed(ground) as answered:
        struck = time.time()
        replica.send_signal(sign)
        ground.killed("replica", replica, known)
        begun = max(struck, await _successor_begins(replica))
        await _until(
            ground, lambda fleet: any(r.state == "ready" and r.replica_id not in known for r in fleet.replicas)
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


async def _successor_begins(before: psutil.Process) -> float:
    """When the process was made in which the next replica starts; Ray may have had it ready before."""
    deadline = time.perf_counter() + WAIT_S
    while time.perf_counter() < deadline:
        with contextlib.suppress(LookupError, psutil.NoSuchProcess):
            for process in processes("replica"):
                if process.pid != before.pid:
                    return process.create_time()
        await asyncio.sleep(0.05)
    raise AssertionError(f"no other replica was started within {WAIT_S:g} s")


@asynccontextmanager
async def _probed(ground: Ground) -> AsyncIterator[list[float]]:
    """A small request every ``PROBE_S``, each on its own: the times of their answers."""
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


def _ready(fleet: Fleet) -> frozenset[str]:
    return frozenset(replica.replica_id for replica in fleet.replicas if replica.state == "ready")


async def _until(ground: Ground, reached: Callable[[Fleet], object], what: str = "is served again") -> None:
    deadline = time.perf_counter() + WAIT_S
    while (fleet := await ground.fleet()) is None or not reached(fleet):
        assert time.perf_counter() < deadline, f"within {WAIT_S:g} s no fleet {what}"
        await asyncio.sleep(0.05)


async def _gone(family: list[psutil.Process]) -> None:
    """Every process has ended, whoever has not taken note of it yet."""
    deadline = time.perf_counter() + WAIT_S
    while left := [process.pid for process in family if alive(process)]:
        assert time.perf_counter() < deadline, f"processes {left} of {[p.pid for p in family]} are still there"
        await asyncio.sleep(0.1)
