"""A replica follows a real log on disk; its engine and its ingest are small ones in this process."""

import asyncio

import pytest

from rollout_service.config import WeightsConfig
from rollout_service.engine.weight_sync import WeightSync
from rollout_service.errors import LogCorrupt
from rollout_service.protocol.weight_log import Control, Head
from rollout_service.store.log import WeightLog
from tests.unit.engine.fakes import LONG_S, push, push_and_hold, serving
from tests.unit.store.versions import FIRST, commit, flip_a_byte


class TestStart:
    async def test_a_replica_loads_the_newest_version_before_it_serves(self, log, engine, ingest):
        commit(log, 1)
        weight_sync = WeightSync("r1", engine, ingest, WeightsConfig(root=log.root), fingerprint="model")
        assert weight_sync.status().state == "starting" and weight_sync.version is None
        await weight_sync.start()
        assert engine.calls == ["pause keep", "load 1", "resume"]
        status = weight_sync.status()
        assert (status.version, status.state, status.target, status.error) == (1, "ready", None, None)
        weight_sync.stop()

    async def test_a_replica_that_starts_first_waits_for_version_0(self, tmp_path, engine, ingest, monkeypatch):
        log, looked, head = WeightLog(tmp_path / "empty"), asyncio.Event(), WeightLog.head

        def noted(self: WeightLog) -> Head | None:
            looked.set()
            return head(self)

        monkeypatch.setattr(WeightLog, "head", noted)
        weight_sync = WeightSync("r1", engine, ingest, WeightsConfig(root=log.root), fingerprint="model")
        starting = asyncio.create_task(weight_sync.start())
        await asyncio.wait_for(looked.wait(), LONG_S)
        assert not starting.done() and engine.calls == []
        commit(log, 0)
        await asyncio.wait_for(starting, LONG_S)
        assert weight_sync.version == 0
        weight_sync.stop()

    async def test_a_replica_does_not_start_on_a_corrupt_version(self, log, engine, ingest):
        flip_a_byte(log, 0, FIRST)
        weight_sync = WeightSync("r1", engine, ingest, WeightsConfig(root=log.root), fingerprint="model")
        with pytest.raises(LogCorrupt, match=FIRST):
            await weight_sync.start()
        assert engine.calls == []

    async def test_a_replica_does_not_load_the_weights_of_another_model(self, log, engine, ingest):
        weight_sync = WeightSync("r1", engine, ingest, WeightsConfig(root=log.root), fingerprint="other")
        with pytest.raises(LogCorrupt, match="belongs to another model"):
            await weight_sync.start()
        assert engine.calls == []


class TestUpdates:
    async def test_a_new_version_is_staged_loaded_while_paused_then_served(self, weight_sync, log, engine, ingest):
        await push(log, ingest, 1)
        await serving(weight_sync, ingest, 1)
        assert engine.calls == ["pause keep", "load 1", "resume"]
        update = ingest.reports[-1].update
        assert update is not None and update.load_s == 0.5 and update.stage_s >= 0 and update.closed_s >= 0

    async def test_while_loading_a_replica_reports_target_and_old_version(self, weight_sync, log, engine, ingest):
        await push_and_hold(log, ingest, engine, 1)
        status = ingest.reports[-1]
        assert (status.version, status.state, status.target) == (0, "syncing", 1)
        assert not await weight_sync.wait_version(1, timeout_s=0.01)
        engine.loading.open()
        await serving(weight_sync, ingest, 1)

    async def test_only_the_newest_of_several_versions_is_loaded(self, weight_sync, log, engine, ingest):
        for version in (1, 2, 3):
            commit(log, version)
        await ingest.change(version=3)
        await serving(weight_sync, ingest, 3)
        assert [call for call in engine.calls if "load" in call] == ["load 3"]

    async def test_a_version_committed_during_an_update_is_loaded_next(self, weight_sync, log, engine, ingest):
        await push_and_hold(log, ingest, engine, 1)
        await push(log, ingest, 2)
        engine.loading.open()
        await serving(weight_sync, ingest, 2)
        assert [call for call in engine.calls if "load" in call] == ["load 1", "load 2"]

    async def test_sequence_numbers_of_reports_grow(self, weight_sync, log, ingest):
        await push(log, ingest, 1)
        await serving(weight_sync, ingest, 1)
        sequences = [status.sequence for status in ingest.reports]
        assert len(sequences) >= 3 and sequences == sorted(set(sequences))


class TestPause:
    async def test_an_update_leaves_a_replica_of_a_paused_fleet_paused(self, weight_sync, log, engine, ingest):
        await ingest.change(paused=True)
        await ingest.reported(lambda s: s.paused)
        await push(log, ingest, 1)
        await serving(weight_sync, ingest, 1)
        assert engine.paused and "resume" not in engine.calls
        await ingest.change(paused=False)
        await ingest.reported(lambda s: not s.paused)
        assert engine.calls[-1] == "resume" and not engine.paused

    async def test_a_resume_that_comes_while_the_engine_pauses_is_not_lost(self, weight_sync, engine, ingest):
        engine.pausing.close()
        engine.pausing.reached.clear()
        await ingest.change(paused=True)
        await asyncio.wait_for(engine.pausing.reached.wait(), LONG_S)
        await ingest.change(paused=False)
        await ingest.reported(lambda _: ingest.seen is not None and not ingest.seen.paused)
        engine.pausing.open()
        async with asyncio.timeout(LONG_S):
            while engine.calls[-1:] != ["resume"]:
                await asyncio.sleep(0.001)
        await ingest.reported(lambda s: not s.paused)
        assert engine.calls == ["pause keep", "resume"]

    async def test_a_replica_started_in_a_paused_fleet_waits_for_resume(self, log, engine, ingest):
        log.set_control(Control(paused=True, mode="keep"))
        await ingest.change(paused=True)
        weight_sync = WeightSync("r1", engine, ingest, WeightsConfig(root=log.root, poll_s=0.01), fingerprint="model")
        await weight_sync.start()
        assert engine.calls == ["pause keep", "load 0"] and weight_sync.status().paused
        await ingest.change(paused=False)
        await ingest.reported(lambda s: not s.paused)
        assert engine.calls[-1] == "resume"
        weight_sync.stop()


class TestWaitingForAVersion:
    async def test_waiting_for_a_version_that_is_served_returns_at_once(self, weight_sync):
        assert await weight_sync.wait_version(0, timeout_s=LONG_S)

    async def test_waiting_ends_when_a_newer_version_is_served(self, weight_sync, log, ingest):
        waiting = asyncio.create_task(weight_sync.wait_version(1, timeout_s=LONG_S))
        await push(log, ingest, 2)
        assert await asyncio.wait_for(waiting, LONG_S)

    async def test_older_exact_version_is_refused_at_once(self, weight_sync, log, ingest):
        await push(log, ingest, 2)
        await serving(weight_sync, ingest, 2)
        assert await weight_sync.wait_version(2, timeout_s=LONG_S, exact=True)
        assert not await weight_sync.wait_version(1, timeout_s=1e9, exact=True)

    async def test_waiting_for_an_exact_version_ends_at_a_newer_one(self, weight_sync, log, ingest):
        waiting = asyncio.create_task(weight_sync.wait_version(1, timeout_s=LONG_S, exact=True))
        await push(log, ingest, 2)
        assert not await asyncio.wait_for(waiting, LONG_S)

    async def test_sleeping_replica_takes_calls_for_its_exact_version(self, weight_sync, log, ingest):
        await ingest.change(paused=True, asleep=True)
        await ingest.reported(lambda s: s.state == "asleep")
        commit(log, 1)
        assert await weight_sync.wait_version(1, timeout_s=LONG_S, exact=True)
        assert not await weight_sync.wait_version(0, timeout_s=0.01, exact=True)

    async def test_a_sleeping_replica_takes_calls_that_it_can_answer(self, weight_sync, ingest):
        await ingest.change(paused=True, asleep=True)
        await ingest.reported(lambda s: s.state == "asleep")
        assert await weight_sync.wait_version(0, timeout_s=LONG_S)
        assert not await weight_sync.wait_version(1, timeout_s=0.01)

    async def test_waiting_in_vain_ends_with_false(self, weight_sync):
        assert not await weight_sync.wait_version(1, timeout_s=0.01)
