"""A replica follows a real log on disk; its engine and its ingest are small ones in this process."""

import asyncio

import pytest

from rollout_service.engine import weight_sync as module
from rollout_service.errors import EngineFailed, KVCacheUnfit, LogCorrupt, NotReady
from rollout_service.kv_scales.cache_choice import CacheChooser
from rollout_service.protocol.weight_log import Control, Head
from rollout_service.store.log import WeightLog
from tests.support.clock import Clock
from tests.unit.engine.fakes import LONG_S, push, push_and_hold, push_until_served, serving
from tests.unit.engine.measuring import LAYERS, FakeCoordinator, FakeMeasuringEngine, uneven
from tests.unit.fleet.completions import completion_of
from tests.unit.store.versions import FIRST, commit, flip_a_byte, stage


class TestStart:
    async def test_a_replica_loads_the_newest_version_before_it_serves(self, follower, log, engine):
        log.commit(stage(log, 5).replace(label="run/step-5"), "keep")
        weight_sync = follower()
        assert weight_sync.status().state == "starting" and weight_sync.version is None
        await weight_sync.start()
        assert engine.calls == ["pause keep", "load 5", "resume"]
        status = weight_sync.status()
        assert (status.version, status.label, status.state) == (5, "run/step-5", "ready")
        assert (status.target, status.error) == (None, None)
        made = completion_of((1, 2), (3, 1), (5, 1), end="stop")
        assert [span.label for span in weight_sync.labels.on([made])[0].spans] == [None, "run/step-5"]

    async def test_a_replica_that_starts_first_waits_for_version_0(self, tmp_path, follower, engine, monkeypatch):
        log, looked, head = WeightLog(tmp_path / "empty"), asyncio.Event(), WeightLog.head

        def noted(self: WeightLog) -> Head | None:
            looked.set()
            return head(self)

        monkeypatch.setattr(WeightLog, "head", noted)
        weight_sync = follower(weights={"root": log.root})
        starting = asyncio.create_task(weight_sync.start())
        await asyncio.wait_for(looked.wait(), LONG_S)
        assert not starting.done() and engine.calls == []
        commit(log, 0)
        await asyncio.wait_for(starting, LONG_S)
        assert weight_sync.version == 0

    @pytest.mark.parametrize(("fingerprint", "says"), [("model", FIRST), ("other", "belongs to another model")])
    async def test_a_replica_does_not_start_on_a_corrupt_or_foreign_version(
        self, follower, log, engine, fingerprint, says
    ):
        if fingerprint == "model":
            flip_a_byte(log, 0, FIRST)
        with pytest.raises(LogCorrupt, match=says):
            await follower(fingerprint).start()
        assert engine.calls == []

    async def test_a_version_committed_in_startup_is_loaded_before_ready(self, follower, log, engine):
        weight_sync = follower()
        engine.loading.close()
        starting = asyncio.create_task(weight_sync.start())
        await engine.loading.until_reached()
        assert (weight_sync.status().state, weight_sync.status().version) == ("syncing", None)
        commit(log, 1)
        engine.loading.open()
        await asyncio.wait_for(starting, LONG_S)
        assert (weight_sync.status().state, weight_sync.version) == ("ready", 1)
        assert engine.loads == ["load 0", "load 1"]

    async def test_a_start_ends_if_versions_come_faster_than_it_loads(self, follower, log, engine, ingest):
        known: dict[int, int | None] = {}

        def overtaken(version: int) -> None:
            known[version] = ingest.reports[-1].version
            commit(log, version + 1)

        engine.before_reading = overtaken
        weight_sync = follower()
        await asyncio.wait_for(weight_sync.start(), LONG_S)
        assert weight_sync.version == 1
        # version 1 was read once the ingest knew of version 0: later commits wait
        assert (known[0], known[1]) == (None, 0)


class TestUpdates:
    async def test_a_new_version_is_staged_loaded_while_paused_then_served(self, weight_sync, log, engine, ingest):
        await push_until_served(weight_sync, log, ingest, 1)
        assert engine.calls == ["pause keep", "load 1", "resume"]
        update = ingest.reports[-1].update
        assert update is not None and update.load_s == 0.5 and update.stage_s >= 0 and update.closed_s >= 0
        sequences = [status.sequence for status in ingest.reports]
        assert len(sequences) >= 3 and sequences == sorted(set(sequences))

    async def test_versions_committed_during_an_update_are_skipped_but_the_newest(
        self, weight_sync, log, engine, ingest
    ):
        await push_and_hold(log, ingest, engine, 1)
        status = ingest.reports[-1]
        assert (status.version, status.state, status.target) == (0, "syncing", 1)
        assert not await weight_sync.wait_version(1, timeout_s=0.01)
        await push(log, ingest, 2)
        await push(log, ingest, 3)
        engine.loading.open()
        await serving(weight_sync, ingest, 3)
        assert engine.loads == ["load 1", "load 3"]


class TestPause:
    async def test_an_update_leaves_a_replica_of_a_paused_fleet_paused(self, weight_sync, log, engine, ingest):
        await ingest.change(paused=True)
        await ingest.reported(lambda s: s.paused)
        await push_until_served(weight_sync, log, ingest, 1)
        assert engine.paused and "resume" not in engine.calls
        await ingest.change(paused=False)
        await ingest.reported(lambda s: not s.paused)
        assert engine.calls[-1] == "resume" and not engine.paused

    async def test_a_resume_that_comes_while_the_engine_pauses_is_not_lost(self, weight_sync, engine, ingest):
        engine.pausing.close()
        await ingest.change(paused=True)
        await engine.pausing.until_reached()
        await ingest.change(paused=False)
        await ingest.reported(lambda _: ingest.seen is not None and not ingest.seen.paused)
        engine.pausing.open()
        async with asyncio.timeout(LONG_S):
            while engine.calls[-1:] != ["resume"]:
                await asyncio.sleep(0.001)
        await ingest.reported(lambda s: not s.paused)
        assert engine.calls == ["pause keep", "resume"]

    async def test_a_replica_started_in_a_paused_fleet_waits_for_resume(self, follower, log, engine, ingest):
        log.set_control(Control(paused=True, mode="keep"))
        await ingest.change(paused=True)
        weight_sync = follower()
        await weight_sync.start()
        assert engine.calls == ["pause keep", "load 0"] and weight_sync.status().paused
        await ingest.change(paused=False)
        await ingest.reported(lambda s: not s.paused)
        assert engine.calls[-1] == "resume"


class TestWaitingForAVersion:
    @pytest.mark.parametrize("exact", [False, True])
    async def test_a_wait_ends_when_that_or_a_newer_version_is_served(self, weight_sync, log, ingest, exact):
        assert await weight_sync.wait_version(0, timeout_s=LONG_S, exact=exact)
        assert not await weight_sync.wait_version(1, timeout_s=0.01, exact=exact)
        waiting = asyncio.create_task(weight_sync.wait_version(1, timeout_s=LONG_S, exact=exact))
        await push(log, ingest, 2)
        assert await asyncio.wait_for(waiting, LONG_S) is not exact
        assert await weight_sync.wait_version(2, timeout_s=LONG_S, exact=exact)
        assert await weight_sync.wait_version(1, timeout_s=1e9, exact=exact) is not exact

    async def test_a_sleeping_replica_takes_calls_that_it_can_answer(self, weight_sync, log, ingest):
        await ingest.change(paused=True, asleep=True)
        await ingest.reported(lambda s: s.state == "asleep")
        commit(log, 1)
        for version, exact, answers in [(1, True, True), (0, True, False), (0, False, True), (2, False, False)]:
            assert await weight_sync.wait_version(version, timeout_s=0.01, exact=exact) is answers


class TestReadiness:
    async def test_a_replica_has_caught_up_when_it_serves_the_last_commit(self, weight_sync, log, engine, ingest):
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

    async def test_catching_up_ends_if_versions_come_faster_than_loads(self, weight_sync, log, engine, ingest):
        await ingest.reported(lambda s: s.version == 0)
        engine.before_reading = lambda version: commit(log, version + 1)
        commit(log, 1)
        waiting = asyncio.create_task(weight_sync.caught_up())
        await ingest.change(version=1)
        await asyncio.wait_for(waiting, LONG_S)
        assert weight_sync.version < log.head().version

    async def test_a_replica_that_cannot_catch_up_says_why(self, weight_sync, log, engine, ingest, monkeypatch):
        monkeypatch.setattr(module, "time", Clock())  # it does not read the corrupt version again, syncing meanwhile
        commit(log, 1)
        flip_a_byte(log, 1, FIRST)
        await ingest.change(version=1)
        with pytest.raises(LogCorrupt, match=FIRST):
            await asyncio.wait_for(weight_sync.caught_up(), LONG_S)
        assert weight_sync.status().state == "stale"
        engine.fail_load = "half loaded"
        await push(log, ingest, 2)
        await ingest.reported(lambda s: s.state == "failed")
        with pytest.raises((EngineFailed, LogCorrupt)):
            await asyncio.wait_for(weight_sync.caught_up(), LONG_S)


class TestEnd:
    async def test_a_replica_that_drains_follows_the_log_until_its_engine_breaks(self, follower, log, engine, ingest):
        drained = False
        weight_sync = follower(draining=lambda: drained)
        await weight_sync.start()
        drained = True
        assert weight_sync.status().state == "draining"
        await push(log, ingest, 1)
        await ingest.reported(lambda s: s.version == 1 and s.state == "draining")
        engine.broken = "the engine's process is dead"
        status = weight_sync.status()
        assert (status.state, status.error) == ("failed", "the engine's process is dead")

    @pytest.mark.parametrize("away", [False, True])
    async def test_a_replica_that_ends_says_goodbye_if_somebody_listens(self, weight_sync, ingest, away):
        if away:
            await ingest.leave(NotReady("it died with this call"))
        await asyncio.wait_for(weight_sync.leave(), LONG_S)
        assert ingest.left == ([] if away else ["r1"])


class TestKVCache:
    @pytest.mark.parametrize("fit", [True, False])
    async def test_the_first_version_is_measured_before_the_engine_resumes(self, follower, log, engine, ingest, fit):
        measured = FakeMeasuringEngine()
        measured.calls = engine.calls
        if not fit:
            measured.keys = {layer: [uneven()] for layer in LAYERS}
        chooser = CacheChooser("r1", measured, FakeCoordinator(), [[1, 2]], None, retry_s=0.001, falls_back=True)
        new = follower(kv_cache=chooser)
        assert new.status().kv_cache is None
        if not fit:
            with pytest.raises(KVCacheUnfit, match="of 2 of 2 layers"):
                await new.start()
            assert "resume" not in engine.calls and new.version is None
            return
        await new.start()
        assert engine.new_calls() == ["pause keep", "load 0", "measure", "resume"]
        status = new.status()
        assert status.kv_cache is not None and status.kv_cache.measured_version == 0
        await push_until_served(new, log, ingest, 1)
        assert engine.calls == ["pause keep", "load 1", "resume"]


class TestPins:
    """A replica of a pinned group follows its group's version, and not the newest."""

    @pytest.fixture
    async def pinned(self, follower, log, engine, ingest):
        """Started in a log with the versions 0 to 2: its group is pinned to version 1."""
        commit(log, 1)
        commit(log, 2)
        ingest.pins["eval"] = head_of(log, 1)
        weight_sync = follower(group="eval")
        await weight_sync.start()
        return weight_sync

    async def test_only_the_pinned_version_is_loaded(self, pinned, log, engine, ingest):
        assert engine.calls == ["pause keep", "load 1", "resume"]
        status = pinned.status()
        assert (status.version, status.state, status.group) == (1, "ready", "eval")
        looked = ingest.looked_for_pins
        await push(log, ingest, 3)
        await ingest.reported(lambda _: ingest.looked_for_pins > looked)
        await ingest.change(paused=True)
        await ingest.reported(lambda status: status.paused)
        assert pinned.version == 1 and engine.staged == [1]

    async def test_a_moved_pin_is_loaded_also_backwards_and_without_one_the_newest(self, pinned, log, ingest):
        for version in (2, 0):
            ingest.pins["eval"] = head_of(log, version)
            await ingest.change(label=f"moved to {version}")
            await serving(pinned, ingest, version)
        ingest.pins["eval"] = None
        await push_until_served(pinned, log, ingest, 3)

    async def test_a_replica_keeps_its_version_while_the_ingest_is_away(self, pinned, log, engine, ingest):
        commit(log, 3)
        await ingest.leave(NotReady("restarting"))
        assert not await pinned.wait_version(3, timeout_s=0.05)
        ingest.unreachable = None
        await ingest.change(version=3)
        await ingest.reported(lambda status: status.state == "ready")
        assert pinned.version == 1 and engine.staged == [1]

    async def test_a_start_waits_for_an_ingest_that_is_away(self, follower, log, engine, ingest):
        commit(log, 1)
        ingest.pins["eval"] = head_of(log, 0)
        ingest.pins_unreachable = asyncio.Event()
        weight_sync = follower(group="eval")
        starting = asyncio.create_task(weight_sync.start())
        await asyncio.wait_for(ingest.pins_unreachable.wait(), LONG_S)
        assert engine.staged == []
        ingest.pins_unreachable = None
        await asyncio.wait_for(starting, LONG_S)
        assert weight_sync.version == 0


def head_of(log: WeightLog, version: int) -> Head:
    return Head(version=version, digest=log.manifest(version).digest)
