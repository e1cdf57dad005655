"""Versions served from memory that are not on the disk yet (``weights.durability: behind``) when something ends.

The machine's crash is that of the ingest: its process is killed and the log in memory removed. With the engines on it,
they are killed, too; without, they go on, as on other machines. Serve's own processes and the gateway stay.
"""

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import psutil

from benchmarks.common.paths import SHARED_MEMORY
from benchmarks.faults.disk import DISK_BYTES, full
from benchmarks.faults.ground import Case, Ground, Skipped, ground, processes
from benchmarks.faults.inputs import refused
from benchmarks.faults.kills import ATTEMPTS, COMMIT_S, MOMENT_S, newest, push_until_committed
from rollout_service.errors import RolloutServiceError, VersionConflict
from rollout_service.store.log import WeightLog
from tests.support.moments import MomentMissed, resume, stop_at, wait_for

LEFT_BYTES = 1 << 20
"""On a full disk: room for a number, and for no version."""
BACK_S = 120.0


def durability_cases() -> Iterator[Case]:
    """Each between the moment in which a version is live and the one in which it is durable."""
    killed = "a version is live and not durable"
    yield Case(f"kill ingest, {killed}", ingest_killed, ground=behind)
    yield Case(f"the ingest's machine crashes, {killed}", partial(machine_crashes, False), ground=behind)
    yield Case(
        f"the ingest's machine crashes with all engines, {killed}", partial(machine_crashes, True), ground=behind
    )
    yield Case(f"kill replica, {killed}: the disk is full", replica_starts_meanwhile, ground=behind_on_a_small_disk)


@asynccontextmanager
async def behind(folder: Path, disk: Path | None = None) -> AsyncIterator[Ground]:
    """The log is in memory, and another one behind it on a disk."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory:
        roots = {"root": Path(memory) / "log", "durability": "behind", "durable_root": disk or folder / "disk"}
        async with ground(folder, weights=roots) as place:
            yield place


@asynccontextmanager
async def behind_on_a_small_disk(folder: Path) -> AsyncIterator[Ground]:
    """The disk has ``DISK_BYTES``. Raises Skipped where none may be mounted."""
    with small_disk(folder / "small"):
        async with behind(folder, folder / "small/log") as place:
            yield place


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """An ext4 of ``DISK_BYTES`` in a file, mounted at ``folder`` until the block ends. Raises Skipped."""
    folder.mkdir(parents=True)
    image = folder.with_suffix(".ext4")
    with image.open("wb") as stream:
        stream.truncate(DISK_BYTES)
    for command in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise Skipped(f"no file may be mounted as a disk here ({done.stderr.strip()}): run it as root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def on_disk(ground: Ground) -> WeightLog:
    """The log behind."""
    root = ground.service.config.weights.durable_root
    assert root is not None, "of a ground that is behind"
    return WeightLog(root)


def durable(ground: Ground) -> int:
    """The newest version on the disk; -1: none is there."""
    head = on_disk(ground).head()
    return -1 if head is None else head.version


async def ingest_killed(ground: Ground) -> None:
    """Nothing is lost: the log in memory is there still, and the successor copies on."""
    version = await struck(ground, lambda: _kill(ground, ["ingest"]))
    await push_until_committed(ground, version)
    await until_durable(ground, version)


async def machine_crashes(with_engines: bool, ground: Ground) -> None:
    """What was said to be durable is there again; the lost number takes the lost weights, and no others."""
    victims = ["ingest", *(("replica", "engine core", "vllm worker") if with_engines else ())]

    def crash() -> None:
        _kill(ground, victims)
        shutil.rmtree(ground.log)

    known = await ground.replica_ids()
    version = await struck(ground, crash)
    ground.replaced = known if with_engines else frozenset()
    ground.committed = durable(ground)
    found = await _latest(ground)
    ground.note(f"version {found} was the newest after the crash")
    assert found == ground.committed < version, f"{ground.committed} was durable, and {version} was not"
    with refused(VersionConflict):
        await ground.client.push_weights(version, ground.weights(version + 1), wait="none")
    await ground.client.discard(version)
    await ground.push(version, wait="durable")


async def replica_starts_meanwhile(ground: Ground) -> None:
    """It has from memory what the disk does not take, and the disk has it once there is room."""
    version, known = ground.committed + 1, await ground.replica_ids()
    with full(ground, on_disk(ground).root.parent, LEFT_BYTES):
        await ground.push(version)
        status = await ground.client.weights(version)
        assert not status.durable and status.error is not None and "No space left" in status.error.message, status
        ground.note(f"version {version} was {status.state} and not durable: no space was left")
        await ground.kill("replica")
        await _newcomer_serves(ground, known, version)
        assert durable(ground) < version, "it was on the disk before the replica had started"
    await until_durable(ground, version)


async def until_durable(ground: Ground, version: int) -> None:
    """The same push again waits for it."""
    await ground.push(version, wait="durable", timeout_s=BACK_S)
    log = on_disk(ground)
    log.verify(log.manifest(version))


async def struck(ground: Ground, strike: Callable[[], None]) -> int:
    """Push versions until one is live while its copy has just begun, and ``strike`` then; returns that version.

    Raises MomentMissed after ``ATTEMPTS`` versions.
    """
    for _ in range(ATTEMPTS):
        version = ground.committed + 1
        pushing = asyncio.create_task(ground.push(version, wait="none"))
        if await asyncio.to_thread(_struck, ground, version, strike):
            ground.note(f"LATEST in memory named version {version}, and on the disk {durable(ground)}")
            pushing.cancel()
            await asyncio.wait([pushing])
            return version
        await pushing
    raise MomentMissed(f"{ATTEMPTS} versions were pushed, and the moment was never seen")


def _struck(ground: Ground, version: int, strike: Callable[[], None]) -> bool:
    ingest, copy = processes("ingest")[0], on_disk(ground).staging(version)
    if not wait_for(WeightLog(ground.log).staging(version).is_dir, COMMIT_S):
        return False
    if not stop_at(ingest, lambda: newest(ground) == version > durable(ground) and copy.is_dir(), MOMENT_S):
        return False
    try:
        strike()
    finally:
        resume(ingest)
    return True


def _kill(ground: Ground, victims: list[str]) -> None:
    for process in [process for victim in victims for process in processes(victim)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:  # an engine goes with its replica
            continue
        ground.gone |= {process.pid}


async def _latest(ground: Ground) -> int:
    """The newest version, once there is an ingest again that says so."""
    async with asyncio.timeout(BACK_S):
        while True:
            try:
                return max(status.version for status in await ground.client.weights() if status.state != "staged")
            except RolloutServiceError:
                await asyncio.sleep(0.2)


async def _newcomer_serves(ground: Ground, known: frozenset[str], version: int) -> None:
    async with asyncio.timeout(BACK_S):
        while True:
            fleet = await ground.fleet()
            newcomers = [] if fleet is None else [r for r in fleet.replicas if r.replica_id not in known]
            if any(replica.state == "ready" and replica.version == version for replica in newcomers):
                return
            await asyncio.sleep(0.2)
