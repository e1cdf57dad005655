"""A replica follows a log that is damaged, and goes on without the ingest."""

import asyncio

import pytest

from rollout_service.engine import weight_sync as module
from rollout_service.engine.weight_sync import WeightSync
from rollout_service.errors import DeploymentFailed, EngineFailed, LogUnreadable, NotReady
from rollout_service.protocol.weight_log import Head
from rollout_service.store.log import WeightLog
from tests.support.clock import Clock
from tests.unit.engine.fakes import LONG_S, push, push_until_served, serving
from tests.unit.store.versions import FIRST, commit, flip_a_byte


async def why_unhealthy(weight_sync: WeightSync) -> str:
    """What its health check says once it fails."""
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                weight_sync.check_health()
            except EngineFailed as error:
                return str(error)
            await asyncio.sleep(0)


async def test_a_corrupt_version_leaves_the_old_served_and_says_why(weight_sync, log, engine, ingest):
    commit(log, 1)
    flip_a_byte(log, 1, FIRST)
    await ingest.change(version=1)
    status = await ingest.reported(lambda s: s.state == "stale")
    assert status.version == 0 and status.target is None
    assert status.error is not None and FIRST in status.error and "version 1" in status.error
    assert engine.calls == []  # the bytes are checked before it is paused
    weight_sync.check_health()
    await push_until_served(weight_sync, log, ingest, 2)
    assert weight_sync.status().error is None and engine.loads == ["load 2"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [("header", "its header is not"), ("no file", "cannot be read"), ("other model", "another model")],
)
async def test_a_version_that_does_not_fit_leaves_the_old_one_served(weight_sync, log, engine, ingest, damage, reason):
    commit(log, 1, fingerprint="other" if damage == "other model" else "model")
    path = log.folder(1) / "weights-00001.safetensors"
    if damage == "header":
        path.write_bytes(path.read_bytes()[:9] + b"?" + path.read_bytes()[10:])
    elif damage == "no file":
        path.unlink()
    await ingest.change(version=1)
    status = await ingest.reported(lambda s: s.state == "stale")
    assert status.version == 0 and status.error is not None and reason in status.error
    assert engine.loads == []


@pytest.mark.parametrize("name", ["LATEST", "ORIGIN"])
async def test_a_file_that_cannot_be_read_for_a_while_is_waited_for(weight_sync, log, engine, ingest, name):
    path = log.root / name
    if path.exists():
        path.rename(log.root / "aside")
    path.mkdir()  # reading it raises OSError
    await ingest.change(label="look")
    status = await ingest.reported(lambda s: s.state == "stale")
    assert status.version == 0 and status.error is not None and name in status.error
    weight_sync.check_health()
    path.rmdir()
    if (log.root / "aside").exists():
        (log.root / "aside").rename(path)
    await push_until_served(weight_sync, log, ingest, 1)
    assert weight_sync.status().error is None and not engine.paused


async def test_a_single_failed_read_changes_nothing(weight_sync, log, ingest, monkeypatch):
    reads, real = 0, WeightLog.head

    def head(self: WeightLog) -> Head | None:
        nonlocal reads
        reads += 1
        if reads == 1:
            raise LogUnreadable("EIO")
        return real(self)

    monkeypatch.setattr(WeightLog, "head", head)
    await ingest.change(label="look")
    while reads < 3:
        await asyncio.sleep(0)
    weight_sync.check_health()
    assert {status.state for status in ingest.reports[1:]} <= {"ready"}


async def test_a_start_waits_for_a_log_that_cannot_be_read(follower, log):
    latest = log.root / "LATEST"
    latest.rename(log.root / "aside")
    latest.mkdir()
    weight_sync = follower()
    starting = asyncio.create_task(weight_sync.start())
    done, _ = await asyncio.wait([starting], timeout=0.05)
    assert not done
    latest.rmdir()
    (log.root / "aside").rename(latest)
    await asyncio.wait_for(starting, LONG_S)
    assert weight_sync.version == 0


async def test_an_engine_whose_workers_fail_while_staging_is_replaced(weight_sync, log, engine, ingest):
    engine.fail_stage = "a worker died"
    await push(log, ingest, 1)
    await ingest.reported(lambda s: s.state == "syncing")
    assert "a worker died" in await why_unhealthy(weight_sync)
    assert weight_sync.version == 0 and not engine.paused


async def test_a_failed_load_ends_following_and_health_checks_fail(weight_sync, log, engine, ingest):
    weight_sync.check_health()
    engine.fail_load = "version 1 is half loaded"
    await push(log, ingest, 1)
    await ingest.reported(lambda s: s.error == "version 1 is half loaded")
    assert "r1 stopped following the log: version 1 is half loaded" in await why_unhealthy(weight_sync)
    assert engine.paused and weight_sync.version == 0
    assert not await weight_sync.wait_version(1, timeout_s=0.01)


async def test_a_corrupt_version_is_read_again_only_after_a_delay(weight_sync, log, engine, ingest, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    commit(log, 1)
    path = log.folder(1) / "weights-00001.safetensors"
    sound = path.read_bytes()
    flip_a_byte(log, 1, FIRST)
    engine.staged.clear()
    await ingest.change(version=1)
    await ingest.reported(lambda s: s.state == "stale")
    for turn in range(20):
        wished = turn % 2 == 0
        await ingest.change(paused=wished)
        await ingest.reported(lambda status, wished=wished: status.paused == wished)
    assert engine.staged == [1]
    clock.go_on(60)  # longer than it waits after the first failure
    await ingest.change(paused=True)
    await ingest.reported(lambda s: len(engine.staged) == 2 and s.state == "stale")  # its failure is noted
    path.write_bytes(sound)
    clock.go_on(60)
    await ingest.change(paused=False)
    await serving(weight_sync, ingest, 1)


async def test_a_version_removed_while_read_gives_way_to_the_newer_one(weight_sync, log, engine, ingest):
    def removed_meanwhile(version: int) -> None:
        if version == 1:
            commit(log, 2)
            log.drop(1)

    engine.before_reading = removed_meanwhile
    await push(log, ingest, 1)
    await serving(weight_sync, ingest, 2)
    assert all(status.error is None for status in ingest.reports)


async def test_a_start_reports_what_it_reads_and_survives_its_removal(follower, log, engine, ingest):
    def removed_meanwhile(version: int) -> None:
        if version == 0:
            assert [(s.version, s.target) for s in ingest.reports] == [(None, 0)]
            commit(log, 1)
            log.drop(0)

    engine.before_reading = removed_meanwhile
    weight_sync = follower()
    await weight_sync.start()
    assert weight_sync.version == 1 and engine.calls == ["pause keep", "load 1", "resume"]


@pytest.mark.parametrize("error", [NotReady("died"), DeploymentFailed("a bug"), TypeError("a bug")], ids=repr)
async def test_without_the_ingest_a_replica_follows_the_log_unless_that_is_a_bug(weight_sync, log, ingest, error):
    weight_sync.check_health()
    await ingest.leave(error)
    if isinstance(error, TypeError):
        assert "a bug" in await why_unhealthy(weight_sync)
        return
    commit(log, 1)
    assert await weight_sync.wait_version(1, timeout_s=LONG_S)
    weight_sync.check_health()
    ingest.unreachable = None
    await serving(weight_sync, ingest, 1)
    await ingest.change(paused=True)
    await ingest.reported(lambda s: s.paused)
