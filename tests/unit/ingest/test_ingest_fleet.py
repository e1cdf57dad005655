"""The ingest and its replicas: waiting for them, waking them, pausing them, keeping what they need."""

import asyncio
import errno
import time
from pathlib import Path

import pytest

from rollout_service.errors import (
    Asleep,
    CommitTimeout,
    InsufficientStorage,
    LogCorrupt,
    LogUnreadable,
    NotReady,
    Overtaken,
    RolloutServiceError,
)
from rollout_service.fleet.coordinator import FleetCoordinator
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.fleet import Pin, ReplicaStatus
from rollout_service.protocol.upload import CommitUpload, RollBack
from rollout_service.protocol.weight_log import Control, DesiredState, Head
from rollout_service.store import durable_io
from rollout_service.store.log import WeightLog
from tests.unit.ingest.faults import fail
from tests.unit.ingest.trainer import (
    Start,
    Trainer,
    Weights,
    begin_of,
    changed,
    config_of,
    order,
    parts_of,
    replica,
    settle,
)

LONG_S = 60.0


def asked(desired: DesiredState) -> tuple[int, bool, str]:
    """What a replica acts on."""
    return desired.version, desired.paused, desired.pause_mode


async def told(ingest: Ingest) -> DesiredState:
    """What replicas are told now."""
    return await ingest.sync(replica("a", 0), None)


async def versions(ingest: Ingest) -> list[int]:
    return [status.version for status in await ingest.versions()]


class TestWaiting:
    async def test_a_waiting_commit_answers_once_every_replica_serves_it(self, ingest, trainer, weights):
        await ingest.report(replica("a", 0))
        await ingest.report(replica("b", 0))
        await trainer.upload(1, weights)
        commit = asyncio.create_task(ingest.commit(1, CommitUpload(wait="all", timeout_s=LONG_S)))
        while (await ingest.fleet()).latest_version != 1:
            await asyncio.sleep(0.001)
        await ingest.report(replica("a", 1, sequence=1))
        await settle()
        assert not commit.done()
        await ingest.report(replica("b", 1, sequence=1))
        status = await asyncio.wait_for(commit, LONG_S)
        assert status.state == "live" and {r.replica_id for r in status.replicas} == {"a", "b"}

    @pytest.mark.parametrize("is_rollback", [False, True])
    async def test_a_version_that_is_removed_while_its_commit_waits_was_live(
        self, ingest, trainer, weights, is_rollback
    ):
        await ingest.report(replica("a", 0))
        await trainer.upload(1, changed(weights, 1.0))
        version = 2 if is_rollback else 1
        if is_rollback:
            await ingest.commit(1, CommitUpload())
            committing = ingest.roll_back(RollBack(to=0, wait="all", timeout_s=LONG_S))
        else:
            committing = ingest.commit(1, CommitUpload(wait="all", timeout_s=LONG_S))
        waiting = asyncio.create_task(committing)
        while (await ingest.fleet()).latest_version != version:
            await asyncio.sleep(0.001)
        for newer in (version + 1, version + 2):
            newest = await trainer.push(newer, changed(weights, newer / 8))
        assert await versions(ingest) == [0, version + 1, version + 2]
        await ingest.report(replica("a", version + 2, 1, digest=newest.digest))
        status = await waiting
        assert (status.version, status.state) == (version, "live")

    async def test_a_replica_at_a_newer_version_counts_for_the_older_ones(self, ingest):
        await ingest.report(replica("a", 3))
        await asyncio.wait_for(ingest.wait_live(2, timeout_s=LONG_S), LONG_S)
        older = await ingest.status(0)
        assert older.state == "live" and [r.version for r in older.replicas] == [3]

    async def test_a_version_stays_committed_when_its_wait_times_out(self, ingest, trainer, weights):
        with pytest.raises(CommitTimeout):  # without any replica, nothing is live
            await ingest.wait_live(0, timeout_s=0.01)
        assert (await ingest.status(0)).state == "committed"
        await ingest.report(replica("a", 0, state="stale", error="disk on fire"))
        await trainer.upload(1, weights)
        with pytest.raises(CommitTimeout, match=r"version 1 is committed, but after 0\.01 s") as late:
            await ingest.commit(1, CommitUpload(wait="all", timeout_s=0.01))
        table = late.value.detail["replicas"]
        assert [(row["replica_id"], row["version"], row["error"]) for row in table] == [("a", 0, "disk on fire")]
        assert (await ingest.status(1)).state == "committed"
        assert (await ingest.fleet()).latest_version == 1


class TestWaking:
    async def test_a_poll_that_has_seen_nothing_is_answered_at_once(self, ingest):
        desired = await asyncio.wait_for(ingest.sync(replica("a", None), None), LONG_S)
        assert asked(desired) == (0, False, "keep")
        assert (desired.digest, desired.origin) == (
            (await ingest.status(0)).digest,
            WeightLog(ingest._log.root).origin(),
        )
        assert [status.replica_id for status in (await ingest.fleet()).replicas] == ["a"]

    async def test_a_waiting_poll_is_answered_when_a_version_is_committed(self, start, model, tmp_path, weights):
        ingest = await start(model, tmp_path / "log", weights={"poll_s": LONG_S, "dead_after_s": 3 * LONG_S})
        poll = asyncio.create_task(ingest.sync(replica("a", 0), await ingest.sync(replica("a", 0), None)))
        await settle()
        assert not poll.done()
        await Trainer(ingest).push(1, weights)
        desired = await asyncio.wait_for(poll, LONG_S)
        assert asked(desired) == (1, False, "keep") and desired.digest == (await ingest.status(1)).digest

    async def test_a_poll_is_answered_with_the_same_wish_after_a_while(self, start, model, tmp_path):
        ingest = await start(model, tmp_path / "log", weights={"poll_s": 0.01})
        desired = await ingest.sync(replica("a", 0), None)
        assert await ingest.sync(replica("a", 0), desired) == desired

    async def test_before_version_0_is_made_a_poll_is_told_to_come_back(self, model, tmp_path):
        ingest = Ingest(config_of(model, tmp_path / "log"))
        with pytest.raises(NotReady, match="version 0 is still being made"):
            await ingest.sync(replica("a", None), None)
        with pytest.raises(NotReady, match="version 0 is still being made"):
            await ingest.fleet()


class Replica:
    """Replica "a": polls with what it has seen, and reports in order."""

    def __init__(self, ingest: Ingest) -> None:
        self._ingest, self._sequence = ingest, 0
        self.seen: DesiredState | None = None

    def _status(self, version: int | None, **fields: object) -> ReplicaStatus:
        self._sequence += 1
        return replica("a", version, self._sequence, **fields)

    async def poll(self, version: int | None = 0, **fields: object) -> DesiredState:
        """Wait until it is told something else."""
        self.seen = await asyncio.wait_for(self._ingest.sync(self._status(version, **fields), self.seen), LONG_S)
        return self.seen

    async def obeyed(self, version: int | None = 0, **fields: object) -> None:
        """It has done what it was told."""
        assert self.seen is not None
        done = {"paused": self.seen.paused, "obeyed": self.seen.order, **fields}
        await self._ingest.report(self._status(version, **done))

    async def obey(self) -> None:
        """For ever."""
        while True:
            await self.poll(obeyed="" if self.seen is None else self.seen.order)
            await self.obeyed()

    async def fall_asleep(self) -> DesiredState:
        asking = asyncio.create_task(self._ingest.sleep("abort", LONG_S))
        desired = await self.poll()
        await self.obeyed(None, state="asleep", paused=True)
        await asyncio.wait_for(asking, LONG_S)
        return desired


@pytest.fixture
async def a(ingest: Ingest) -> Replica:
    """It runs, and has seen so."""
    found = Replica(ingest)
    await found.poll()
    return found


class TestPausing:
    async def test_a_pause_and_a_resume_answer_once_every_replica_has_obeyed(self, ingest, a):
        for paused in (True, False):
            asking = asyncio.create_task(ingest.set_paused(paused, "wait", LONG_S))
            assert asked(await a.poll(paused=a.seen.paused, obeyed=a.seen.order))[:2] == (0, paused)
            assert not asking.done() and not await ingest.is_paused()
            await a.obeyed()
            await asyncio.wait_for(asking, LONG_S)
            assert await ingest.is_paused() is (await ingest.fleet()).paused is paused

    async def test_a_pause_outlives_a_commit(self, ingest, trainer, weights):
        ordered = await order(ingest, True, "abort")
        await trainer.push(1, weights)
        desired = await ingest.sync(replica("a", 0, sequence=1, paused=True), None)
        assert (asked(desired), desired.order) == ((1, True, "abort"), ordered)

    async def test_a_resume_during_a_pause_waits_until_it_is_obeyed_itself(self, ingest, a):
        pause = asyncio.create_task(ingest.set_paused(True, "wait", LONG_S))
        await a.poll()
        resume = asyncio.create_task(ingest.set_paused(False, "keep", LONG_S))
        with pytest.raises(Overtaken, match="before every replica was paused, something else was asked for"):
            await asyncio.wait_for(pause, LONG_S)
        assert not resume.done()  # the replica says that it runs, but may have begun to pause since
        await a.poll()
        await a.obeyed()
        await asyncio.wait_for(resume, LONG_S)

    async def test_a_pause_in_another_way_waits_until_that_is_obeyed(self, ingest, a):
        for mode, on_abort in (("keep", "continue"), ("abort", "return"), ("abort", "continue")):
            pause = asyncio.create_task(ingest.set_paused(True, mode, LONG_S, on_abort))
            desired = await a.poll(paused=a.seen.paused, obeyed=a.seen.order)
            assert (desired.paused, desired.pause_mode, desired.on_abort) == (True, mode, on_abort)
            assert not pause.done()
            await a.obeyed()
            await asyncio.wait_for(pause, LONG_S)

    async def test_several_ranks_may_ask_for_the_same_pause(self, ingest, a):
        ranks = [asyncio.create_task(ingest.set_paused(True, "keep", LONG_S)) for _ in range(3)]
        await a.poll()
        await a.obeyed()
        await asyncio.wait_for(asyncio.gather(*ranks), LONG_S)
        assert await ingest.is_paused()

    async def test_dropping_the_cache_of_a_pause_keeps_the_pause(self, ingest, a):
        pause = asyncio.create_task(ingest.set_paused(True, "keep", LONG_S, clear_cache=False))
        kept = await a.poll()
        await a.obeyed()
        await asyncio.wait_for(pause, LONG_S)
        drop = asyncio.create_task(ingest.drop_kv_cache(LONG_S))
        dropped = await a.poll(paused=True, obeyed=kept.order)
        assert (kept.clear_cache, dropped.clear_cache, dropped.paused) == (False, True, True) and not drop.done()
        await a.obeyed()
        await asyncio.wait_for(drop, LONG_S)
        await asyncio.wait_for(ingest.drop_kv_cache(LONG_S), LONG_S)  # it is empty already
        assert await ingest.is_paused()

    async def test_dropping_the_cache_pauses_and_resumes(self, ingest, a):
        drop = asyncio.create_task(ingest.drop_kv_cache(LONG_S))
        seen = []
        for _ in range(2):
            desired = await a.poll(paused=a.seen.paused, obeyed=a.seen.order)
            seen.append((desired.paused, desired.pause_mode, desired.clear_cache))
            await a.obeyed()
        await asyncio.wait_for(drop, LONG_S)
        assert seen == [(True, "keep", True), (False, "keep", True)]

    @pytest.mark.parametrize("paused", [False, True])
    async def test_dropping_the_cache_ends_no_wait_of_a_version(self, ingest, trainer, weights, a, paused):
        if paused:
            pause = asyncio.create_task(ingest.set_paused(True, "keep", LONG_S, clear_cache=False))
            await a.poll()
            await a.obeyed()
            await pause
        await trainer.upload(1, weights)
        await ingest.commit(1, CommitUpload(mode="wait"))
        before = await a.poll(paused=paused, obeyed=a.seen.order)
        with pytest.raises(NotReady, match="version 1 waits for rollouts, and not all replicas serve it"):
            await ingest.drop_kv_cache(timeout_s=0.01)
        drop = asyncio.create_task(ingest.drop_kv_cache(LONG_S))
        await settle()
        assert await told(ingest) == before
        await a.obeyed(1)
        for pauses in (True,) if paused else (True, False):
            desired = await a.poll(1, paused=a.seen.paused, obeyed=a.seen.order)
            assert (desired.paused, desired.clear_cache) == (pauses, True)
            await a.obeyed(1)
        await asyncio.wait_for(drop, LONG_S)

    async def test_dropping_the_cache_of_a_sleeping_fleet_waits_for_no_version(self, ingest, trainer, weights, a):
        await a.fall_asleep()
        await trainer.upload(1, weights)
        await ingest.commit(1, CommitUpload(mode="wait"))
        before = await told(ingest)
        await asyncio.wait_for(ingest.drop_kv_cache(LONG_S), LONG_S)
        assert await told(ingest) == before and before.version == 1

    async def test_dropping_the_cache_leaves_no_pause_behind(self, ingest, log):
        await ingest.report(replica("deaf", 0))
        before = await told(ingest)
        drop = asyncio.create_task(ingest.drop_kv_cache(LONG_S))
        while not (await told(ingest)).paused:
            await asyncio.sleep(0)
        assert log.control() == Control()  # an ingest that restarts pauses nothing
        drop.cancel()
        await asyncio.wait([drop])
        assert await told(ingest) == before
        with pytest.raises(NotReady, match="not every replica is cleared"):
            await ingest.drop_kv_cache(timeout_s=0.01)
        assert await told(ingest) == before and log.control() == Control()

    async def test_several_callers_may_drop_the_cache_at_once(self, ingest, a):
        obeying = asyncio.create_task(a.obey())
        await asyncio.wait_for(asyncio.gather(*(ingest.drop_kv_cache(LONG_S) for _ in range(4))), LONG_S)
        obeying.cancel()
        assert not (await told(ingest)).paused

    @pytest.mark.parametrize("wakes", [False, True], ids=["resume", "wake up"])
    async def test_what_holds_already_is_not_overtaken_by_a_cache_that_is_dropped(self, ingest, a, wakes):
        await ingest.report(replica("busy", 0))
        drop = asyncio.create_task(ingest.drop_kv_cache(LONG_S))
        await a.poll()
        await a.obeyed()
        asks = ingest.wake_up(["weights"], 0.01) if wakes else ingest.set_paused(False, "keep", 0.01)
        with pytest.raises(NotReady, match="they go on trying"):  # until the cache is dropped
            await asks
        await ingest.goodbye("busy")
        obeying = asyncio.create_task(a.obey())
        await asyncio.wait_for(drop, LONG_S)
        obeying.cancel()

    async def test_a_pause_outlives_a_cache_that_is_dropped(self, ingest):
        await ingest.report(replica("a", 0))
        drop = asyncio.create_task(ingest.drop_kv_cache(LONG_S))
        while not (await told(ingest)).paused:
            await asyncio.sleep(0)
        await order(ingest, True, "keep")
        with pytest.raises(Overtaken):
            await asyncio.wait_for(drop, LONG_S)
        assert await ingest.is_paused()

    async def test_a_pause_that_times_out_says_so_and_stays_in_effect(self, ingest):
        await ingest.report(replica("deaf", 0))
        with pytest.raises(NotReady, match=r"not every replica is paused after 0\.01 s") as late:
            await ingest.set_paused(True, "keep", timeout_s=0.01)
        assert late.value.detail["replicas"][0]["replica_id"] == "deaf"
        assert (await ingest.fleet()).paused and not await ingest.is_paused()


class TestAborting:
    async def test_an_abort_answers_once_every_replica_has_aborted(self, ingest, log, a):
        await ingest.report(replica("b", 0))
        before = a.seen
        abort = asyncio.create_task(ingest.abort_running(LONG_S))
        desired = await a.poll()
        assert desired == before.model_copy(update={"abort": desired.abort}) and desired.abort > 0
        await a.obeyed(aborted=desired.abort)
        await settle()
        assert not abort.done()
        await ingest.report(replica("b", 0, 2, aborted=desired.abort))
        await asyncio.wait_for(abort, LONG_S)
        assert await told(ingest) == before and log.control() == Control()

    async def test_an_abort_is_newer_than_those_of_a_clock_that_went_back(self, ingest, a):
        before = 2 * time.time_ns()
        await a.obeyed(aborted=before)
        abort = asyncio.create_task(ingest.abort_running(LONG_S))
        desired = await a.poll(aborted=before)
        assert desired.abort > before and not abort.done()
        await a.obeyed(aborted=desired.abort)
        await asyncio.wait_for(abort, LONG_S)

    async def test_an_abort_that_nobody_waits_for_or_obeys_is_over(self, ingest, log, a):
        abort = asyncio.create_task(ingest.abort_running(LONG_S))
        await settle()
        abort.cancel()
        await asyncio.wait([abort])
        assert await told(ingest) == a.seen and log.control() == Control()
        with pytest.raises(NotReady, match="nothing is paused") as late:
            await ingest.abort_running(timeout_s=0.01)
        assert [status["replica_id"] for status in late.value.detail["replicas"]] == ["a"]
        assert await told(ingest) == a.seen and log.control() == Control()

    async def test_an_abort_overtakes_neither_a_pause_nor_an_abort(self, ingest, a):
        pause = ingest.set_paused(True, "keep", LONG_S)
        asks = (pause, ingest.abort_running(LONG_S), ingest.abort_running(LONG_S))
        asked = [asyncio.create_task(call) for call in asks]
        while not (desired := await told(ingest)).paused or not desired.abort:
            await asyncio.sleep(0)
        await ingest.report(replica("a", 0, 9, paused=True, obeyed=desired.order, aborted=desired.abort))
        await asyncio.wait_for(asyncio.gather(*asked), LONG_S)
        assert await ingest.is_paused()


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """Let nothing be written, as on a file system without a free block."""
    fail(patch, durable_io, "write_synced", errno.ENOSPC)


class TestFailingDisk:
    async def test_a_resume_on_a_full_or_read_only_disk_is_obeyed(self, ingest, log, monkeypatch):
        await order(ingest, True)
        with monkeypatch.context() as full:
            fill_disk(full)
            await order(ingest, False)
            assert not await ingest.is_paused() and not log.control().paused
        await order(ingest, True)
        fill_disk(monkeypatch)
        fail(monkeypatch, WeightLog, "clear_control", errno.EROFS)
        await order(ingest, False)
        assert not await ingest.is_paused()

    async def test_engines_wake_on_a_full_disk(self, ingest, monkeypatch, a):
        await a.fall_asleep()
        fill_disk(monkeypatch)
        for tag in ("weights", "kv_cache"):
            waking = asyncio.create_task(ingest.wake_up([tag], LONG_S))
            desired = await a.poll(None, state="asleep")
            await a.obeyed(None, state="asleep", paused=False)
            assert await waking == (tag == "kv_cache") == (not desired.asleep)

    async def test_a_pause_that_cannot_be_noted_changes_nothing(self, ingest, monkeypatch):
        before = await told(ingest)
        fill_disk(monkeypatch)
        with pytest.raises(InsufficientStorage, match="which is not changed"):
            await ingest.set_paused(True, "keep", LONG_S)
        with pytest.raises(InsufficientStorage):
            await ingest.sleep("abort", LONG_S)
        fail(monkeypatch, durable_io, "write_synced", errno.EROFS)
        with pytest.raises(RolloutServiceError, match=r"is not changed: .*; make that folder writable"):
            await ingest.set_paused(True, "keep", LONG_S)
        assert await told(ingest) == before

    async def test_a_commit_stands_while_the_log_cannot_be_listed(self, ingest, trainer, weights, monkeypatch):
        await ingest.report(replica("a", 0))
        await trainer.upload(1, weights)
        with monkeypatch.context() as patch:
            follow = FleetCoordinator.follow

            def unreadable(log: WeightLog) -> list[int]:
                raise LogUnreadable("EIO")

            def follow_and_fail(self: FleetCoordinator, head: Head) -> None:
                follow(self, head)
                patch.setattr(WeightLog, "_folders", unreadable)

            patch.setattr(FleetCoordinator, "follow", follow_and_fail)
            assert (await ingest.commit(1, CommitUpload())).version == (await told(ingest)).version == 1

    @pytest.mark.parametrize("error", [LogUnreadable("EIO"), LogCorrupt("LATEST does not parse")], ids=str)
    @pytest.mark.parametrize("reads", [1, 2, 3], ids=["versions", "pins", "drop"])
    async def test_a_commit_stands_while_no_version_can_be_removed(
        self, start, model, tmp_path, weights, monkeypatch, caplog, error, reads
    ):
        groups = {"old": {"version": 1}}
        ingest = await start(model, tmp_path / "log", scaling={"groups": groups}, weights={"keep_versions": 2})
        await ingest.report(replica("a", 0))
        await push_labelled(ingest, 1, weights, None)
        remove_old, head, left = ingest._remove_old, WeightLog.head, reads

        def fail_later(log: WeightLog) -> Head | None:
            nonlocal left
            left -= 1
            if left <= 0:
                raise error
            return head(log)

        async def remove_from_unreadable_log() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(WeightLog, "head", fail_later)
                await remove_old()

        monkeypatch.setattr(ingest, "_remove_old", remove_from_unreadable_log)
        await ingest.report(replica("a", 1, sequence=1))
        await push_labelled(ingest, 2, weights, None)
        await push_labelled(ingest, 3, weights, None)
        assert await versions(ingest) == [0, 1, 2, 3] and left <= 0
        assert f"no version is removed now, and the next commit tries again: {error}" in caplog.text


class TestKeeping:
    async def test_old_versions_are_dropped_beyond_those_to_keep(self, ingest, trainer, weights, log):
        for version in (1, 2, 5):
            await trainer.push(version, weights)
        assert await versions(ingest) == [2, 5]
        assert {path.name for path in log.root.iterdir() if path.name.isdigit()} == {"2", "5"}

    async def test_a_version_that_a_live_replica_serves_or_loads_is_kept(self, ingest, trainer, weights):
        await ingest.report(replica("slow", 0, target=1))
        for version in (1, 2, 3, 4):
            await trainer.push(version, weights)
        assert await versions(ingest) == [0, 1, 3, 4]
        await ingest.report(replica("slow", 4, sequence=1))
        await trainer.push(5, weights)
        assert await versions(ingest) == [4, 5]


class TestComingAndGoing:
    async def test_a_commit_stops_waiting_for_a_replica_that_says_goodbye(self, ingest, log):
        await ingest.report(replica("ends", 0))
        await ingest.report(replica("stays", 1))
        assert log.fleet() == {"ends", "stays"}
        waiting = asyncio.create_task(ingest.wait_live(1, timeout_s=LONG_S))
        await settle()
        assert not waiting.done()
        await ingest.goodbye("ends")
        await asyncio.wait_for(waiting, LONG_S)
        assert [r.replica_id for r in (await ingest.fleet()).replicas] == ["stays"]
        assert log.fleet() == {"stays"}

    async def test_a_node_without_the_log_is_told_what_is_newest(self, ingest, log):
        newest = await ingest.newest()
        assert newest.head == log.head() and newest.origin == log.origin()
        assert {file.name for file in await ingest.files(0)} == {path.name for path in log.folder(0).iterdir()}


class TestMetrics:
    async def test_metrics_state_has_the_fleet_versions_and_commit_times(self, ingest, trainer, weights):
        await ingest.report(replica("a", 0))
        await trainer.push(1, weights)
        await ingest.report(replica("a", 1, sequence=1))
        await ingest.report(replica("b", 0, state="failed"))
        await ingest.report(replica("a", 1, sequence=2, state="failed"))
        state = await ingest.state()
        assert {status.replica_id for status in state.fleet.replicas} == {"a", "b"}
        assert [status.version for status in state.versions] == [0, 1]
        assert state.committed_at[0] <= state.committed_at[1] <= state.at
        assert state.log_bytes > sum(status.total_bytes for status in state.versions)
        assert (state.replica_starts, state.replica_failures) == (2, 1)


class TestSleeping:
    async def test_a_sleep_answers_once_every_engine_sleeps_and_outlives_a_restart(self, ingest, log, a):
        assert not await ingest.is_sleeping() and await ingest.until_awake()
        await ingest.report(replica("b", None, state="starting", takes_memory=True))
        asking = asyncio.create_task(ingest.sleep("abort", LONG_S))
        desired = await a.poll()
        assert (desired.paused, desired.pause_mode, desired.asleep) == (True, "abort", True)
        await a.obeyed(None, state="asleep", paused=True)
        assert not asking.done() and not await ingest.is_sleeping()
        asleep = {"state": "asleep", "paused": True, "obeyed": desired.order, "takes_memory": True}
        await ingest.report(replica("b", None, sequence=1, **asleep))
        await asyncio.wait_for(asking, LONG_S)
        assert await ingest.is_sleeping() and await ingest.is_paused() and (await ingest.fleet()).asleep
        assert log.control().asleep == ("weights", "kv_cache") and log.control().paused

    async def test_engines_wake_once_all_their_memory_was_asked_back(self, ingest, a):
        await a.fall_asleep()
        part = asyncio.create_task(ingest.wake_up(["weights"], LONG_S))
        assert (await a.poll(None, state="asleep")).asleep
        await a.obeyed(None, state="asleep", paused=True)
        assert await asyncio.wait_for(part, LONG_S) is False
        rest = asyncio.create_task(ingest.wake_up(["kv_cache"], LONG_S))
        awake = await a.poll(None, state="asleep")
        assert (awake.paused, awake.asleep) == (False, False) and not rest.done()
        await a.obeyed()
        assert await asyncio.wait_for(rest, LONG_S) is True
        assert not await ingest.is_sleeping() and not await ingest.is_paused()

    async def test_waking_engines_that_do_not_sleep_leaves_a_pause_alone(self, ingest):
        ordered = await order(ingest, True, "keep")
        assert await ingest.wake_up(["weights", "kv_cache"], LONG_S) is True
        assert await ingest.is_paused() and (await told(ingest)).order == ordered

    async def test_engines_asleep_cannot_be_resumed_and_delay_no_commit(self, ingest, trainer, weights, a):
        desired = await a.fall_asleep()
        await ingest.set_paused(True, "keep", LONG_S)
        assert (await told(ingest)) == desired
        with pytest.raises(Asleep, match="POST /wake_up"):
            await ingest.set_paused(False, "keep", LONG_S)
        assert await ingest.is_sleeping()
        await trainer.upload(1, weights)
        status = await ingest.commit(1, CommitUpload(wait="all", timeout_s=LONG_S))
        assert (status.state, (await told(ingest)).version) == ("committed", 1)


class TestPins:
    @pytest.fixture
    async def pinning(self, start: Start, model: Path, tmp_path: Path) -> Ingest:
        groups = {"eval": {"version": "golden"}, "old": {"version": 1}}
        return await start(model, tmp_path / "log", scaling={"groups": groups}, weights={"keep_versions": 1})

    async def test_group_without_its_version_follows_the_newest(self, pinning):
        assert (await pinning.pinned("eval"), await pinning.pinned("old")) == (None, None)
        assert (await pinning.fleet()).groups == {
            "eval": Pin(pinned_to="golden", version=None),
            "old": Pin(pinned_to=1, version=None),
        }

    async def test_push_with_the_label_moves_the_group(self, pinning, weights):
        found = []
        for version, label in ((1, "golden"), (2, None), (3, "golden")):
            await push_labelled(pinning, version, weights, label)
            found.append(await pinning.pinned("eval"))
        assert [head and (head.version, head.label) for head in found] == [(1, "golden"), (1, "golden"), (3, "golden")]
        assert found[2] is not None and found[2].digest == (await pinning.status(3)).digest
        assert {name: pin.version for name, pin in (await pinning.fleet()).groups.items()} == {"eval": 3, "old": 1}

    async def test_a_group_hears_of_rollbacks_before_its_version(self, pinning, weights):
        await push_labelled(pinning, 1, weights, "golden")
        await push_labelled(pinning, 2, {**weights, "model.norm.weight": weights["model.norm.weight"] + 1}, None)
        await pinning.roll_back(RollBack(to=1, wait="none"))
        await push_labelled(pinning, 4, weights, "golden")
        assert (head := await pinning.pinned("eval")) is not None and (head.version, head.rolled_back_at) == (4, 3)

    async def test_pinned_versions_stay_on_disk(self, pinning, weights):
        for version, label in ((1, None), (2, "golden"), (3, None), (4, None), (5, None)):
            await push_labelled(pinning, version, weights, label)
        assert await versions(pinning) == [1, 2, 4, 5]


async def push_labelled(ingest: Ingest, version: int, weights: Weights, label: str | None) -> None:
    trainer = Trainer(ingest)
    plan = await ingest.begin(begin_of(version, weights).model_copy(update={"label": label}))
    await trainer.send(plan, parts_of(weights))
    await ingest.commit(version, CommitUpload())
    await trainer.http.aclose()
