"""A real ingest process killed with SIGKILL around the rename of LATEST, and what its successor finds."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path

import psutil

from rollout_service.config import ServiceConfig
from rollout_service.protocol.upload import CommitUpload
from rollout_service.store.log import WeightLog
from tests.support.moments import stop_at
from tests.unit.ingest.trainer import started

PROJECT = Path(__file__).parents[3]


async def test_a_kill_before_the_rename_leaves_the_version_staged(config, log):
    def manifest_written(version: int) -> bool:
        written = any((folder / "manifest.json").is_file() for folder in (log.staging(version), log.folder(version)))
        return written and newest(log) < version

    version = await killed_in(manifest_written, config)
    assert newest(log) == version - 1
    async with started(config) as successor:
        status = await successor.status(version)
        assert status.state == "staged" and status.missing_parts == () and status.error is None
        assert not log.folder(version).exists()
        committed = await successor.commit(version, CommitUpload())
    assert newest(log) == version
    log.verify(log.manifest(version))
    assert committed.digest == log.manifest(version).digest


async def test_a_kill_after_the_rename_leaves_the_version_committed(config, log):
    version = await killed_in(lambda version: newest(log) == version, config)
    assert newest(log) == version
    async with started(config) as successor:
        assert (await successor.fleet()).latest_version == version
        assert {status.state for status in await successor.versions()} == {"committed"}
        again = await successor.commit(version, CommitUpload())
    log.verify(log.manifest(version))
    assert again.digest == log.manifest(version).digest


async def killed_in(moment: Callable[[int], bool], config: ServiceConfig) -> int:
    """Commit versions in an ingest process until one's ``moment`` is hit, and kill it there; returns that version."""
    command = [sys.executable, "-m", "tests.unit.store.committer", config.model.path, config.weights.root]
    process = await asyncio.create_subprocess_exec(*command, cwd=PROJECT, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        for version in range(1, 20):
            process.stdin.write(f"{version}\n".encode())
            assert await process.stdout.readline() == b"staged\n"
            process.stdin.write(b"commit\n")
            await process.stdin.drain()
            if await asyncio.to_thread(stop_at, psutil.Process(process.pid), lambda: moment(version), 3.0):  # noqa: B023
                return version
            assert await process.stdout.readline() == b"committed\n"
        raise AssertionError("no commit was ever seen in the moment")
    finally:
        process.kill()
        await process.wait()


def newest(log: WeightLog) -> int:
    """What LATEST says."""
    head = log.head()
    return -1 if head is None else head.version
