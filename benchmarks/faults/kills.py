"""Every process killed at every moment."""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import psutil

from benchmarks.faults.ground import PROCESSES, Ground, processes
from rollout_service.client._tensors import TensorSource, bytes_of_each
from rollout_service.client._upload import cut_parts
from rollout_service.errors import RolloutServiceError
from rollout_service.weights.upload import BeginUpload

Fault = Callable[[Ground], Awaitable[None]]

POLL_S = 0.0002
"""How often the log is looked at for the moment of a rename."""
UPDATE_S = 0.15
"""An update of the small model closes an engine for about half of that after its commit."""


def kill_cases() -> Iterator[tuple[str, bool, Fault]]:
    """Name, whether there is load, and what happens."""
    for victim in PROCESSES:
        yield f"kill {victim}, idle", False, partial(at_once, victim)
        yield f"kill {victim}, generating", True, partial(at_once, victim)
        yield f"kill {victim}, staging", True, partial(while_staging, victim)
        yield f"kill {victim}, updating", True, partial(while_updating, victim)
        yield f"kill {victim}, before the rename", True, partial(around_the_rename, victim, before=True)
        yield f"kill {victim}, after the rename", True, partial(around_the_rename, victim, before=False)


def kill_one(victim: str) -> None:
    """SIGKILL for one process of the kind."""
    random.choice(processes(victim)).kill()


async def at_once(victim: str, ground: Ground) -> None:
    """Kill now."""
    kill_one(victim)


async def while_staging(victim: str, ground: Ground) -> None:
    """Kill when half of a version's parts have been sent; the trainer then sends the version again."""
    version = ground.committed + 1
    await send_half(ground, version)
    kill_one(victim)
    await push_until_committed(ground, version)


async def while_updating(victim: str, ground: Ground) -> None:
    """Kill at a random moment of the first tenths of a second after a commit, in which the engines load it."""
    version = ground.committed + 1
    await ground.push(version, wait="none")
    await asyncio.sleep(random.uniform(0, UPDATE_S))
    kill_one(victim)


async def around_the_rename(victim: str, ground: Ground, *, before: bool) -> None:
    """Kill as soon as the version's folder is complete, or as soon as LATEST names it."""
    version = ground.committed + 1
    watching = threading.Thread(target=_kill_at_the_rename, args=(victim, ground.log, version, before), daemon=True)
    watching.start()
    await push_until_committed(ground, version)
    await asyncio.to_thread(watching.join, 10)


def _kill_at_the_rename(victim: str, log: Path, version: int, before: bool) -> None:
    found = random.choice(processes(victim))
    latest, deadline = log / "LATEST", time.monotonic() + 60
    before_it = latest.read_bytes()
    while time.monotonic() < deadline:
        complete = any(manifest.is_file() for manifest in log.glob(f"*{version}/manifest.json"))
        if (complete and before) or latest.read_bytes() != before_it:
            found.kill()
            return
        time.sleep(POLL_S)


async def send_half(ground: Ground, version: int) -> None:
    """Begin a version and send every second part of it, as a trainer that dies half way."""
    source = TensorSource(ground.weights(version), None)
    uploader = ground.client._uploader
    plan = await uploader.begin(BeginUpload(version=version, tensors=source.table))
    for part in cut_parts(bytes_of_each(source), plan.part_bytes):
        if part.index % 2 == 0:
            await ground.put_part(version, part.index, bytes(part.data), part.digest)


async def push_until_committed(ground: Ground, version: int, timeout_s: float = 120) -> None:
    """Push as a trainer would that is told of a failure: again, until the service says that it is committed."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                await ground.push(version, wait="none")
                return
            except RolloutServiceError:
                await asyncio.sleep(0.5)


async def stop_for_a_while(ground: Ground, seconds: float = 30.0) -> None:
    """A replica and its engine stand still, then go on; a version is committed meanwhile."""
    replica = random.choice(processes("replica"))
    stopped = [replica, *replica.children(recursive=True)]
    _signal(stopped, psutil.Process.suspend)
    try:
        await push_until_committed(ground, ground.committed + 1)
        await asyncio.sleep(seconds)
    finally:
        _signal(stopped, psutil.Process.resume)


def _signal(stopped: list[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in stopped:
        if process.is_running():
            send(process)
