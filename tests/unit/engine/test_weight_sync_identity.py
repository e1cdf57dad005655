"""A version's number does not say which weights it names: the log may be restored, cloned, or begun anew elsewhere."""

from pathlib import Path

import pytest

from rollout_service.engine.weight_sync import WeightSync
from rollout_service.errors import NotReady
from rollout_service.protocol.weight_log import Origin
from rollout_service.store.log import WeightLog
from tests.unit.engine.fakes import push_until_served, serving
from tests.unit.ingest.trainer import settle
from tests.unit.store.versions import commit, restored


async def test_other_weights_under_the_served_number_are_loaded(weight_sync, log, engine, ingest):
    with restored(log):
        await push_until_served(weight_sync, log, ingest, 1)
        before = weight_sync.status().digest
    head = commit(log, 1, content=77)
    status = await ingest.reported(lambda s: s.digest == head.digest and s.state == "ready")
    assert (status.version, status.digest) == (1, head.digest) and before not in (None, head.digest)
    assert engine.loads[0] == engine.loads[-1] == "load 1" and len(engine.loads) >= 2


async def test_a_log_that_was_set_back_is_followed_back(weight_sync, log, engine, ingest):
    with restored(log):
        await push_until_served(weight_sync, log, ingest, 5)
    await ingest.change(version=0)
    await serving(weight_sync, ingest, 0)
    assert engine.loads == ["load 5", "load 0"]


async def test_a_replica_that_starts_compares_contents_too(follower, log, engine, ingest):
    engine.loading.close()
    weight_sync = follower()
    with restored(log):
        commit(log, 1)
        engine.loading.open()
        await weight_sync.start()
    head = commit(log, 1, content=77)
    status = await ingest.reported(lambda s: s.digest == head.digest)
    assert status.version == 1


@pytest.fixture
def elsewhere(tmp_path: Path) -> Origin:
    """Of an ingest that was started on another node, where its root was empty."""
    other = WeightLog(tmp_path / "elsewhere")
    commit(other, 0)
    return other.sign()


async def ingest_is_away(weight_sync: WeightSync) -> None:
    """Until it has looked once more."""
    while weight_sync._woken.is_set():
        await settle()


class TestAnotherLog:
    async def test_a_replica_of_the_old_log_is_stale_until_it_comes_back(self, weight_sync, log, ingest, elsewhere):
        here = log.sign()
        await ingest.change(origin=here)
        await push_until_served(weight_sync, log, ingest, 7)
        assert weight_sync.status().log == here.log
        await ingest.change(version=0, origin=elsewhere)
        status = await ingest.reported(lambda s: s.state == "stale")
        assert status.version == 7 and status.log == here.log
        assert status.error is not None and "the ingest writes another log now" in status.error
        await ingest.change(version=7, origin=here)
        await ingest.reported(lambda s: s.state == "ready" and s.error is None)
        await push_until_served(weight_sync, log, ingest, 8)

    async def test_nor_is_a_clone_of_the_log_taken_for_the_log(self, weight_sync, log, ingest):
        here = log.sign()
        await ingest.change(origin=here.model_copy(update={"writer": "of the clone"}))
        status = await ingest.reported(lambda s: s.state == "stale")
        assert status.error is not None and "bring the ingest back" in status.error

    async def test_no_replica_is_stale_after_an_ingest_restart_on_its_log(self, weight_sync, log, ingest):
        await ingest.change(origin=log.sign())
        seen = len(ingest.reports)
        await ingest.reported(lambda _: len(ingest.reports) > seen)
        await ingest.leave(NotReady("it died with this call"))
        later = log.sign()
        for _ in range(3):  # it looks while nobody has told it of the new ingest
            weight_sync._woken.set()
            await ingest_is_away(weight_sync)
        ingest.unreachable = None
        await ingest.change(origin=later)
        await push_until_served(weight_sync, log, ingest, 1)
        assert "stale" not in {status.state for status in ingest.reports}
