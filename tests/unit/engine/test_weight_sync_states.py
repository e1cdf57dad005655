"""What a replica says of itself, and when Serve may take it for ready."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rollout_service.config import WeightsConfig
from rollout_service.engine import weight_sync as module
from rollout_service.engine.weight_sync import WeightSync
from rollout_service.errors import EngineFailed, LogCorrupt, NotReady
from rollout_service.store.log import WeightLog
from tests.support.clock import Clock
from tests.unit.engine.fakes import LONG_S, FakeEngine, FakeIngest
from tests.unit.store.versions import FIRST, commit, flip_a_byte


@pytest.fixture
def drained() -> set[str]:
    """Replicas that get no calls any more."""
    return set()


@pytest.fixture
async def weight_sync(
    log: WeightLog, engine: FakeEngine, ingest: FakeIngest, drained: set[str]
) -> AsyncIterator[WeightSync]:
    """Not started yet."""
    config = WeightsConfig(root=log.root, poll_s=0.01)
    weight_sync = WeightSync("r1", engine, ingest, config, "model", draining=lambda: "r1" in drained)
    yield weight_sync
    weight_sync.stop()


async def test_a_version_committed_in_startup_is_loaded_before_ready(weight_sync, log, engine):
    engine.loading.close()
    starting = asyncio.create_task(weight_sync.start())
    await asyncio.wait_for(engine.loading.reached.wait(), LONG_S)
    assert (weight_sync.status().state, weight_sync.status().version) == ("syncing", None)
    commit(log, 1)
    engine.loading.open()
    await asyncio.wait_for(starting, LONG_S)
    assert (weight_sync.status().state, weight_sync.version) == ("ready", 1)
    assert [call for call in engine.calls if "load" in call] == ["load 0", "load 1"]


async def test_a_start_ends_if_versions_come_faster_than_it_loads(weight_sync, log, engine, ingest):
    known: dict[int, int | None] = {}

    def overtaken(version: int) -> None:
        known[version] = ingest.reports[-1].version
        commit(log, version + 1)

    engine.before_reading = overtaken
    await asyncio.wait_for(weight_sync.start(), LONG_S)
    assert weight_sync.version == 1
    assert (known[0], known[1]) == (None, 0)  # version 1 was read once the ingest knew of version 0: later commits wait


async def test_a_replica_has_caught_up_when_it_serves_the_last_commit(weight_sync, log, engine, ingest):
    await weight_sync.start()
    await asyncio.wait_for(weight_sync.caught_up(), LONG_S)
    engine.loading.close()
    commit(log, 1)
    waiting = asyncio.create_task(weight_sync.caught_up())
    await ingest.change(version=1)
    await ingest.reported(lambda s: s.target == 1)
    assert not waiting.done()
    engine.loading.open()
    await asyncio.wait_for(waiting, LONG_S)
    assert weight_sync.version == 1


async def test_catching_up_ends_if_versions_come_faster_than_loads(weight_sync, log, engine, ingest):
    await weight_sync.start()
    await ingest.reported(lambda s: s.version == 0)
    engine.before_reading = lambda version: commit(log, version + 1)
    commit(log, 1)
    waiting = asyncio.create_task(weight_sync.caught_up())
    await ingest.change(version=1)
    await asyncio.wait_for(waiting, LONG_S)
    assert weight_sync.version < log.head().version


async def test_a_replica_that_cannot_catch_up_says_why(weight_sync, log, engine, ingest, monkeypatch):
    monkeypatch.setattr(module, "time", Clock())  # it does not read the corrupt version again, syncing meanwhile
    await weight_sync.start()
    commit(log, 1)
    flip_a_byte(log, 1, FIRST)
    await ingest.change(version=1)
    with pytest.raises(LogCorrupt, match=FIRST):
        await asyncio.wait_for(weight_sync.caught_up(), LONG_S)
    assert weight_sync.status().state == "stale"
    engine.fail_load = "half loaded"
    commit(log, 2)
    await ingest.change(version=2)
    await ingest.reported(lambda s: s.state == "failed")
    with pytest.raises((EngineFailed, LogCorrupt)):
        await asyncio.wait_for(weight_sync.caught_up(), LONG_S)


async def test_a_replica_with_a_broken_engine_has_failed_in_any_state(weight_sync, engine, drained):
    await weight_sync.start()
    drained.add("r1")
    engine.broken = "the engine's process is dead"
    status = weight_sync.status()
    assert (status.state, status.error) == ("failed", "the engine's process is dead")


async def test_a_replica_without_calls_drains_but_follows_the_log(weight_sync, log, ingest, drained):
    await weight_sync.start()
    drained.add("r1")
    assert weight_sync.status().state == "draining"
    commit(log, 1)
    await ingest.change(version=1)
    await ingest.reported(lambda s: s.version == 1 and s.state == "draining")


async def test_a_replica_that_ends_says_goodbye(weight_sync, ingest):
    await weight_sync.start()
    await weight_sync.leave()
    assert ingest.left == ["r1"]


async def test_a_replica_ends_without_the_ingest_too(weight_sync, ingest):
    await weight_sync.start()
    await ingest.leave(NotReady("it died with this call"))
    await asyncio.wait_for(weight_sync.leave(), LONG_S)
    assert ingest.left == []
