"""Damaged files of the log, just before a replica must read them; and a log on a small file system that is full."""

import asyncio
import errno
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.faults.ground import REPLICAS, Case, Ground, Skipped, ground
from benchmarks.faults.inputs import refused
from benchmarks.faults.kills import begin_parts, send_parts
from rollout_service.errors import InsufficientStorage
from rollout_service.protocol.upload import CommitUpload

DAMAGED_S = 15.0  # between the kill and the version that heals: the successor reads the damaged one meanwhile
DISK_BYTES = 96 << 20  # several versions of the small model


def storage_cases() -> Iterator[Case]:
    """Yield damages of a file, and both moments of a full disk."""
    yield Case("a flipped byte in a file of the log", damaged(flip))
    yield Case("a truncated file of the log", damaged(truncate))
    yield Case("a full disk when a version begins", full_at_begin, ground=on_a_small_disk)
    yield Case("a full disk when a version is committed", full_at_commit, ground=on_a_small_disk)


def damaged(damage: Callable[[Path], None]) -> Callable[[Ground], Awaitable[None]]:
    """Damage the newest version and kill an engine: its successor must not serve it. A newer version heals."""

    async def fault(ground: Ground) -> None:
        known = await ground.replica_ids()
        damage(max((ground.log / str(ground.committed)).glob("*.safetensors")))
        await ground.kill("engine core")
        await asyncio.sleep(DAMAGED_S)
        if newcomers := await ground.replica_ids() - known:
            ready = [r for r in (await ground.client.fleet()).replicas if r.replica_id in newcomers]
            ground.note(f"the successor said {[(r.state, r.version) for r in ready]}")
            if any(r.state == "ready" for r in ready):
                raise AssertionError("a replica is ready at a version whose bytes are damaged")
        await ground.push(ground.committed + 1, wait="none")

    return fault


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))


def truncate(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 1024)


@asynccontextmanager
async def on_a_small_disk(folder: Path, **settings: dict[str, Any]) -> AsyncIterator[Ground]:
    """Put the log on a tmpfs of ``DISK_BYTES``. Raises Skipped where none may be mounted."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        raise Skipped(f"no tmpfs may be mounted here ({mounted.stderr.strip()}): run it as root or in unshare -Urm")
    try:
        settings["weights"] = settings.get("weights", {}) | {"root": disk / "log"}
        async with ground(folder, replicas=REPLICAS, **settings) as place:
            yield place
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@contextmanager
def full(ground: Ground) -> Iterator[None]:
    """Leave no byte free on the log's file system until the block ends."""
    folder = ground.log.parent
    ballast = folder / "ballast"
    try:
        with ballast.open("wb", buffering=0) as stream:
            _fill(stream.fileno())
        status = os.statvfs(folder)
        ground.note(f"{status.f_bfree * status.f_frsize} bytes were free on a disk of {DISK_BYTES}")
        yield
    finally:
        ballast.unlink()


def _fill(fd: int) -> None:
    block = bytes(1 << 20)
    while block:
        try:
            os.write(fd, block)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            block = block[: len(block) // 2]


async def full_at_begin(ground: Ground) -> None:
    """Refuse the version before a byte is sent; take it once there is room."""
    version = ground.committed + 1
    with full(ground), refused(InsufficientStorage):
        await ground.client.push_weights(version, ground.weights(version))
    await ground.push(version)


async def full_at_commit(ground: Ground) -> None:
    """Have all parts, and no room for the manifest: nothing is committed until there is."""
    version = ground.committed + 1
    await send_parts(ground, version, await begin_parts(ground, version))
    with full(ground), refused(InsufficientStorage):
        await ground.send("POST", f"/v1/weights/{version}/commit", json=CommitUpload().model_dump(mode="json"))
    status = await ground.client.weights(version)
    ground.note(f"version {version} was {status.state} afterwards")
    await ground.push(version)
