"""A replica on a node without the log: it fetches what it serves, through a real object store."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollout_service.engine.weight_sync import WeightSync
from rollout_service.errors import NotReady
from rollout_service.store.log import WeightLog
from rollout_service.store.node_cache import ChunkServer, NodeCache
from tests.unit.engine.fakes import LONG_S, push, push_until_served, serving
from tests.unit.store.offering import CHUNK_BYTES, OfferingIngest
from tests.unit.store.versions import FIRST, commit, flip_a_byte

pytestmark = pytest.mark.usefixtures("object_store")


@pytest.fixture
def offering(log: WeightLog) -> OfferingIngest:
    log.sign()
    return OfferingIngest(ChunkServer(log, CHUNK_BYTES))


@pytest.fixture
def copies(offering: OfferingIngest, tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "node", offering, offering.served.newest(), CHUNK_BYTES)


@pytest.fixture
async def remote(started: Callable[..., Awaitable[WeightSync]], copies: NodeCache) -> WeightSync:
    """Started on the other node."""
    return await started(weights={"root": copies.log.root}, copies=copies)


async def test_every_version_is_fetched_checked_and_served(remote, log, engine, ingest, copies):
    assert remote.version == 0
    for version in (1, 2, 3):
        await push_until_served(remote, log, ingest, version)
    assert engine.loads == ["load 1", "load 2", "load 3"]
    assert copies.log.versions() == [2, 3] and copies.log.head() == log.head()


async def test_without_the_ingest_a_replica_serves_then_catches_up(remote, log, ingest, offering):
    offering.fail_after = len(offering.chunks) + 2
    await push(log, ingest, 1)
    status = await ingest.reported(lambda s: s.state == "stale")
    assert status.version == 0 and status.error is not None and "died with this call" in status.error
    offering.unreachable = NotReady("it died with this call")
    for _ in range(2):  # it asks again
        await offering.has_refused()
    remote.check_health()
    offering.fail_after = offering.unreachable = None
    await serving(remote, ingest, 1)
    assert remote.status().error is None


async def test_a_copy_that_was_damaged_on_this_node_is_fetched_anew(follower, copies, log):
    head = log.head()
    assert head is not None
    await copies.fetch(head)
    flip_a_byte(copies.log, 0, FIRST)
    weight_sync = follower(weights={"root": copies.log.root}, copies=copies)
    await asyncio.wait_for(weight_sync.start(), LONG_S)
    assert weight_sync.version == 0
    copies.log.verify(copies.log.manifest(0))


async def test_a_start_is_not_ready_until_the_newest_version_is_known(remote, log, offering, ingest):
    await asyncio.wait_for(remote.caught_up(), LONG_S)
    offering.unreachable = NotReady("it died with this call")
    commit(log, 1)
    waiting = asyncio.create_task(remote.caught_up())
    for _ in range(2):  # it asks again
        await offering.has_refused()
    assert not waiting.done()
    offering.unreachable = None
    await ingest.change(version=1)
    await asyncio.wait_for(waiting, LONG_S)
    assert remote.version == 1
