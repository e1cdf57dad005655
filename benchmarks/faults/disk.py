"""A log on a small file system that is full: before a version begins, and between its last part and its commit."""

import errno
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.faults.ground import REPLICAS, Case, Ground, Skipped, ground
from benchmarks.faults.inputs import refused
from benchmarks.faults.kills import begin_parts, send_parts
from rollout_service.errors import InsufficientStorage
from rollout_service.protocol.upload import CommitUpload

DISK_BYTES = 96 << 20
"""Of a version of the small model it holds several."""


def disk_cases() -> Iterator[Case]:
    """Both on one small tmpfs."""
    yield Case("a full disk when a version begins", full_at_begin, ground=on_a_small_disk)
    yield Case("a full disk when a version is committed", full_at_commit, ground=on_a_small_disk)


@asynccontextmanager
async def on_a_small_disk(folder: Path, **settings: dict[str, Any]) -> AsyncIterator[Ground]:
    """The log's root is a tmpfs of ``DISK_BYTES``. Raises Skipped where none may be mounted."""
    with tmpfs(folder / "disk"):
        settings["weights"] = settings.get("weights", {}) | {"root": folder / "disk/log"}
        async with ground(folder, replicas=REPLICAS, **settings) as place:
            yield place


@contextmanager
def tmpfs(folder: Path) -> Iterator[None]:
    """Mounted at ``folder`` until the block ends. Raises Skipped."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        raise Skipped(f"no tmpfs may be mounted here ({mounted.stderr.strip()}): run it as root or in unshare -Urm")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full(ground: Ground, folder: Path, leave_bytes: int = 0) -> Iterator[None]:
    """No more than that is free on the file system of ``folder`` until the block ends; says so in the notes."""
    ballast = folder / "ballast"
    try:
        with ballast.open("wb", buffering=0) as stream:
            _fill(stream.fileno())
            os.ftruncate(stream.fileno(), os.fstat(stream.fileno()).st_size - leave_bytes)
        ground.note(f"{_free(folder)} bytes were free on a disk of {DISK_BYTES}")
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


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bfree * status.f_frsize


async def full_at_begin(ground: Ground) -> None:
    """Refused before a byte is sent; taken once there is room."""
    version = ground.committed + 1
    with full(ground, ground.log.parent), refused(InsufficientStorage):
        await ground.client.push_weights(version, ground.weights(version))
    await ground.push(version)


async def full_at_commit(ground: Ground) -> None:
    """All parts are there, and the manifest has no room: nothing is committed until it has."""
    version = ground.committed + 1
    await send_parts(ground, version, await begin_parts(ground, version))
    with full(ground, ground.log.parent), refused(InsufficientStorage):
        await ground.send("POST", f"/v1/weights/{version}/commit", json=CommitUpload().model_dump(mode="json"))
    status = await ground.client.weights(version)
    ground.note(f"version {version} was {status.state} afterwards")
    await ground.push(version)
