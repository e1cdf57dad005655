"""A real ingest process killed with SIGKILL around the rename of LATEST, and what its successor finds."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TypeAlias

import psutil
import pytest

from rollout_service.config import ServiceConfig
from rollout_service.protocol.upload import CommitUpload
from rollout_service.store.log import WeightLog
from tests.support.moments import stop_at
from tests.unit.ingest.trainer import started

PROJECT = Path(__file__).parents[3]
Committer: TypeAlias = "Popen[str]"


@pytest.fixture(scope="module")
def committer() -> Iterator[Committer]:
    """A process that starts the ingests, without their imports."""
    command = [sys.executable, "-m", "tests.unit.store.committer"]
    with Popen(command, cwd=PROJECT, stdin=PIPE, stdout=PIPE, text=True, bufsize=1) as process:
        yield process


async def test_a_kill_before_the_rename_leaves_the_version_staged(config, log, committer):
    def manifest_written(version: int) -> bool:
        written = any((folder / "manifest.json").is_file() for folder in (log.staging(version), log.folder(version)))
        return written and newest(log) < version

    version = killed_in(manifest_written, config, committer)
    assert newest(log) == version - 1
    async with started(config) as successor:
        status = await successor.status(version)
        assert status.state == "staged" and status.missing_parts == () and status.error is None
        assert not log.folder(version).exists()
        committed = await successor.commit(version, CommitUpload())
    assert newest(log) == version
    log.verify(log.manifest(version))
    assert committed.digest == log.manifest(version).digest


async def test_a_kill_after_the_rename_leaves_the_version_committed(config, log, committer):
    version = killed_in(lambda version: newest(log) == version, config, committer)
    assert newest(log) == version
    async with started(config) as successor:
        assert (await successor.fleet()).latest_version == version
        assert {status.state for status in await successor.versions()} == {"committed"}
        again = await successor.commit(version, CommitUpload())
    log.verify(log.manifest(version))
    assert again.digest == log.manifest(version).digest


def killed_in(moment: Callable[[int], bool], config: ServiceConfig, committer: Committer) -> int:
    """Commit versions in an ingest process until one's ``moment`` is hit, and kill it there; returns that version."""
    asked, told = committer.stdin, committer.stdout
    assert asked is not None and told is not None
    asked.write(f"{config.model.path} {config.weights.root}\n")
    process = psutil.Process(int(told.readline()))
    try:
        for version in range(1, 20):
            asked.write(f"{version}\n")
            assert told.readline() == "staged\n"
            asked.write("commit\n")
            if stop_at(process, lambda: moment(version), 3.0):  # noqa: B023
                return version
            assert told.readline() == "committed\n"
        raise AssertionError("no commit was ever seen in the moment")
    finally:
        process.kill()
        process.wait()


def newest(log: WeightLog) -> int:
    """What LATEST says."""
    head = log.head()
    return -1 if head is None else head.version
