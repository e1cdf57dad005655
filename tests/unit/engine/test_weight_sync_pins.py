"""A replica of a pinned group follows its group's version, and not the newest."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rollout_service.config import WeightsConfig
from rollout_service.engine.weight_sync import WeightSync
from rollout_service.errors import NotReady
from rollout_service.protocol.weight_log import Head
from rollout_service.store.log import WeightLog
from tests.unit.engine.fakes import LONG_S, FakeEngine, FakeIngest, push, serving
from tests.unit.store.versions import commit


@pytest.fixture
async def pinned(log: WeightLog, engine: FakeEngine, ingest: FakeIngest) -> AsyncIterator[WeightSync]:
    """Started in a log with the versions 0 to 2: its group is pinned to version 1."""
    commit(log, 1)
    commit(log, 2)
    ingest.pins["eval"] = head_of(log, 1)
    config = WeightsConfig(root=log.root, poll_s=0.01)
    weight_sync = WeightSync("r1", engine, ingest, config, fingerprint="model", group="eval")
    await weight_sync.start()
    yield weight_sync
    weight_sync.stop()


def head_of(log: WeightLog, version: int) -> Head:
    return Head(version=version, digest=log.manifest(version).digest)


async def test_start_loads_only_the_pinned_version(pinned, engine):
    assert engine.calls == ["pause keep", "load 1", "resume"]
    status = pinned.status()
    assert (status.version, status.state, status.group) == (1, "ready", "eval")


async def test_newer_version_is_not_loaded(pinned, log, engine, ingest):
    looked = ingest.looked_for_pins
    await push(log, ingest, 3)
    await ingest.reported(lambda _: ingest.looked_for_pins > looked)
    await ingest.change(paused=True)
    await ingest.reported(lambda status: status.paused)
    assert pinned.version == 1 and engine.staged == [1]


async def test_moved_pin_is_loaded_also_backwards(pinned, log, ingest):
    for version in (2, 0):
        ingest.pins["eval"] = head_of(log, version)
        await ingest.change(label=f"moved to {version}")
        await serving(pinned, ingest, version)


async def test_group_without_a_version_follows_the_newest(pinned, log, ingest):
    ingest.pins["eval"] = None
    await push(log, ingest, 3)
    await serving(pinned, ingest, 3)


async def test_replica_keeps_its_version_while_the_ingest_is_away(pinned, log, engine, ingest):
    commit(log, 3)
    await ingest.leave(NotReady("restarting"))
    assert not await pinned.wait_version(3, timeout_s=0.05)
    ingest.unreachable = None
    await ingest.change(version=3)
    await ingest.reported(lambda status: status.state == "ready")
    assert pinned.version == 1 and engine.staged == [1]


async def test_start_waits_for_an_ingest_that_is_away(log, engine, ingest):
    commit(log, 1)
    ingest.pins["eval"] = head_of(log, 0)
    ingest.pins_unreachable = asyncio.Event()
    config = WeightsConfig(root=log.root, poll_s=0.01)
    weight_sync = WeightSync("r1", engine, ingest, config, fingerprint="model", group="eval")
    starting = asyncio.create_task(weight_sync.start())
    await asyncio.wait_for(ingest.pins_unreachable.wait(), LONG_S)
    assert engine.staged == []
    ingest.pins_unreachable = None
    await asyncio.wait_for(starting, LONG_S)
    assert weight_sync.version == 0
    weight_sync.stop()
