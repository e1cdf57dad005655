"""What the ingest remembers for metrics."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from rollout_service.config import ScalingConfig
from rollout_service.metrics.state import FleetHistory
from rollout_service.protocol.fleet import Fleet, ReplicaStatus
from rollout_service.protocol.weights import WeightStatus
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import MANIFEST_FILE

FLEET = Fleet(latest_version=1, paused=False, replicas=())


def history(root: Path) -> FleetHistory:
    return FleetHistory(WeightLog(root), ScalingConfig(min_replicas=2, max_replicas=5))


def live(*replicas: str, **states: str) -> tuple[ReplicaStatus, ...]:
    """Ready ones, and others by state."""
    named = {**dict.fromkeys(replicas, "ready"), **states}
    return tuple(ReplicaStatus.model_validate({"replica_id": r, "version": 1, "state": s}) for r, s in named.items())


async def counts(history: FleetHistory) -> tuple[int, int]:
    """Starts and failures."""
    state = await history.state(FLEET, ())
    return state.replica_starts, state.replica_failures


async def test_each_replica_starts_and_fails_once_however_often_it_reports(tmp_path):
    seen = history(tmp_path)
    seen.add_known(frozenset({"known"}))  # before an ingest restart: not new
    for expected, *reports in (
        ((4, 0), live("known", "a"), live("known", "a", "b", "c", "d"), live("known", "a", "b", "c", "d")),
        ((4, 1), live("known", "b", "c", "d", a="failed"), live("known", "b", "c", "d", a="failed")),
        ((4, 2), live("known", "c", d="draining")),  # the failed one is gone as expected, b died
    ):
        for report in reports:
            seen.saw(report)
        assert await counts(seen) == expected
    seen.note_left("c")
    seen.note_left("unknown")
    seen.saw(live("known"))
    assert await counts(seen) == (4, 2)  # d drained and c said goodbye
    seen.saw(())
    assert await counts(seen) == (4, 3)


def commit(root: Path, version: int, at: float) -> WeightStatus:
    """A version as the log has it, but for its tensors."""
    folder = root / str(version)
    folder.mkdir()
    (folder / MANIFEST_FILE).write_bytes(bytes(10))
    os.utime(folder / MANIFEST_FILE, (at, at))
    return WeightStatus(version=version, state="live")


async def test_the_commit_time_of_a_removed_version_is_remembered(tmp_path):
    seen = history(tmp_path)
    staged = WeightStatus(version=3, state="staged")
    await seen.state(FLEET, (commit(tmp_path, 1, at=100.0), commit(tmp_path, 2, at=200.0), staged))
    (tmp_path / "1" / MANIFEST_FILE).unlink()
    state = await seen.state(FLEET, (WeightStatus(version=2, state="live"),))
    assert state.committed_at == {1: 100.0, 2: 200.0}


async def test_only_so_many_times_are_remembered(tmp_path):
    seen = history(tmp_path)
    versions = tuple(commit(tmp_path, version, at=float(version)) for version in range(1030))
    state = await seen.state(FLEET, versions)
    assert len(state.committed_at) == 1024 and min(state.committed_at) == 6


async def test_the_log_is_as_large_as_its_files_whether_the_disk_answers_or_not(tmp_path, monkeypatch):
    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    seen = history(tmp_path)
    commit(tmp_path, 1, at=1.0)
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / "part-0").write_bytes(bytes(90))
    before = await seen.state(FLEET, ())
    assert before.log_bytes == 100 and before.log_free_bytes > 0
    assert (before.replicas_min, before.replicas_max) == (2, 5)
    monkeypatch.setattr(shutil, "disk_usage", stale)
    state = await seen.state(FLEET, ())
    assert (state.log_free_bytes, state.log_bytes) == (before.log_free_bytes, 100)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES])
async def test_one_unreadable_file_is_left_out(tmp_path, monkeypatch, caplog, number):
    seen, stat, read = history(tmp_path), Path.stat, os.scandir
    versions = tuple(commit(tmp_path, version, at=10.0 * version) for version in (1, 2, 3))
    broken = {str(tmp_path / "1" / MANIFEST_FILE), str(tmp_path / "3")}

    def failing_stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if str(path) in broken:
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, follow_symlinks=follow_symlinks)

    def failing_scandir(path: str) -> object:
        if str(path) in broken:
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "stat", failing_stat)
        disk.setattr(os, "scandir", failing_scandir)
        for _ in range(2):
            state = await seen.state(FLEET, versions)
    assert (state.committed_at, state.log_bytes) == ({2: 20.0, 3: 30.0}, 10)
    [warning] = caplog.messages
    assert "leave out what cannot be read" in warning and str(tmp_path / "1") in warning
    state = await seen.state(FLEET, versions)
    assert (state.committed_at, state.log_bytes) == ({1: 10.0, 2: 20.0, 3: 30.0}, 30)
