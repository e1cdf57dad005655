"""Pauses, resumes and versions that come while running rollouts are waited for."""

import asyncio

import pytest

from rollout_service.errors import EngineFailed, NotReady
from rollout_service.store.log import WeightLog
from tests.unit.engine.fakes import LONG_S, FakeEngine, FakeIngest, push, serving
from tests.unit.store.versions import FIRST, commit, flip_a_byte


@pytest.fixture
def running(engine: FakeEngine) -> FakeEngine:
    """An engine with a rollout that does not finish until ``draining`` is opened."""
    engine.draining.close()
    return engine


async def pause(ingest: FakeIngest, mode: str, order: str) -> None:
    """Order a pause, which is not waited for."""
    await ingest.change(paused=True, pause_mode=mode, order=order)


async def pause_that_waits(engine: FakeEngine, ingest: FakeIngest, order: str = "first") -> None:
    await pause(ingest, "wait", order)
    await drains(engine)


async def drains(engine: FakeEngine) -> None:
    """The engine waits for its rollout."""
    await engine.draining.until_reached()
    engine.draining.reached.clear()


class TestWaitingPause:
    async def test_a_resume_cancels_a_waiting_pause_and_is_then_obeyed(self, weight_sync, running, ingest):
        await pause_that_waits(running, ingest)
        assert (weight_sync.status().paused, weight_sync.status().obeyed) == (False, "")
        assert not (await ingest.order("second", paused=False)).paused
        assert running.calls == ["pause wait", "resume"]
        running.draining.open()
        assert (await ingest.order("third", paused=True, pause_mode="wait")).paused

    @pytest.mark.parametrize("mode", ["abort", "keep"])
    async def test_another_mode_takes_a_waiting_pause_over(self, weight_sync, running, ingest, mode):
        await pause_that_waits(running, ingest)
        assert (await ingest.order("second", paused=True, pause_mode=mode)).paused
        assert running.calls == ["pause wait", f"pause {mode}"]

    async def test_a_pause_changed_from_keep_to_wait_waits_for_what_runs(self, weight_sync, running, ingest):
        await ingest.order("first", paused=True, pause_mode="keep")
        await pause_that_waits(running, ingest, "second")
        assert not weight_sync.status().paused
        running.draining.open()
        assert (await ingest.reported(lambda s: s.obeyed == "second")).paused

    @pytest.mark.parametrize("mode", ["keep", "wait"])
    async def test_pause_drops_the_cache_only_if_asked(self, weight_sync, engine, ingest, mode):
        for order, clear_cache in {"keeps": False, "again": False, "drops": True, "after": False}.items():
            await ingest.order(order, paused=True, pause_mode=mode, clear_cache=clear_cache)
        assert engine.calls == [f"pause {mode} and keep the cache", f"pause {mode}"]

    async def test_version_drops_what_a_waiting_pause_keeps(self, weight_sync, running, ingest, log):
        await ingest.change(paused=True, pause_mode="wait", order="first", clear_cache=False)
        await drains(running)
        await push(log, ingest, 1, mode="wait")
        await drains(running)
        running.draining.open()
        await serving(weight_sync, ingest, 1)
        assert running.calls[:3] == ["pause wait and keep the cache", "pause wait", "load 1"]

    @pytest.mark.parametrize("asleep", [False, True])
    async def test_an_engine_that_fails_to_pause_or_sleep_ends_following(
        self, weight_sync, running, ingest, monkeypatch, asleep
    ):
        async def dies(*_: object) -> None:
            raise EngineFailed("the engine died")

        monkeypatch.setattr(running, "sleep" if asleep else "pause", dies)
        await ingest.change(paused=True, pause_mode="abort" if asleep else "wait", asleep=asleep, order="first")
        await asyncio.wait([weight_sync._tasks[1]], timeout=LONG_S)
        with pytest.raises(EngineFailed, match="stopped following the log: the engine died"):
            weight_sync.check_health()


class TestAborts:
    async def test_a_pause_that_returns_what_it_aborts_is_counted(self, weight_sync, engine, ingest):
        counts = []
        for order, change in {
            "aborts": {"paused": True, "pause_mode": "abort"},
            "resumes": {"paused": False},
            "returns": {"paused": True, "pause_mode": "abort", "on_abort": "return"},
            "again": {"paused": True, "pause_mode": "abort", "on_abort": "return"},
            "holds": {"paused": True, "pause_mode": "keep", "on_abort": "return"},
        }.items():
            await ingest.order(order, **change)
            counts.append(weight_sync.pausing.returns)
        assert counts == [0, 0, 1, 1, 1]

    async def test_an_abort_returns_what_runs_and_pauses_nothing(self, weight_sync, engine, ingest):
        await ingest.change(abort=7)
        assert not (await ingest.reported(lambda s: s.aborted == 7)).paused
        await ingest.change(abort=0)  # it has ended
        await ingest.change(label="again")
        await ingest.reported(lambda s: ingest.seen is not None and ingest.seen.label == "again")
        assert (engine.calls, weight_sync.pausing.returns) == (["abort"], 1)


async def test_pauses_and_aborts_are_obeyed_while_a_version_is_read(weight_sync, log, engine, ingest):
    engine.reading.close()
    await push(log, ingest, 1)
    await engine.reading.until_reached()
    await ingest.change(abort=7)
    await ingest.reported(lambda s: s.aborted == 7)
    await ingest.order("first", paused=True, pause_mode="abort")
    await ingest.change(abort=8)  # which leaves it paused
    assert (await ingest.reported(lambda s: s.aborted == 8)).paused
    assert engine.calls == ["abort", "pause abort", "abort"] and weight_sync.version == 0
    engine.reading.open()
    await ingest.reported(lambda s: s.version == 1 and s.paused)
    assert engine.calls == ["abort", "pause abort", "abort", "pause keep", "load 1"]


class TestVersionDuringAPause:
    async def test_a_version_with_mode_keep_loads_while_a_pause_waits_on(self, weight_sync, log, running, ingest):
        await pause_that_waits(running, ingest)
        await push(log, ingest, 1, mode="keep")
        await serving(weight_sync, ingest, 1)
        await drains(running)
        assert running.calls == ["pause wait", "pause keep", "load 1", "pause wait"]
        assert not weight_sync.status().paused
        running.draining.open()
        assert (await ingest.reported(lambda s: s.obeyed == "first")).paused
        assert "resume" not in running.calls

    async def test_a_version_with_mode_abort_fulfils_a_waiting_pause(self, weight_sync, log, running, ingest):
        await pause_that_waits(running, ingest)
        await push(log, ingest, 1, mode="abort")
        await running.loading.until_reached()
        running.draining.open()  # nothing runs any more
        assert (await ingest.reported(lambda s: s.obeyed == "first" and s.version == 1)).paused
        assert running.calls[:3] == ["pause wait", "pause abort", "load 1"] and "resume" not in running.calls


async def commit_that_waits(log: WeightLog, engine: FakeEngine, ingest: FakeIngest) -> None:
    await push(log, ingest, 1, mode="wait")
    await drains(engine)


class TestWaitingVersion:
    @pytest.mark.parametrize("mode", ["keep", "abort"])
    async def test_a_newer_version_takes_over_from_one_that_waits(self, weight_sync, log, running, ingest, mode):
        await commit_that_waits(log, running, ingest)
        await push(log, ingest, 2, mode=mode)
        await serving(weight_sync, ingest, 2)
        assert running.calls == ["pause wait", f"pause {mode}", "load 2", "resume"]

    async def test_between_two_waiting_versions_no_new_rollout_begins(self, weight_sync, log, running, ingest):
        await commit_that_waits(log, running, ingest)
        await push(log, ingest, 2, mode="wait")
        await ingest.reported(lambda s: s.target == 2)
        running.draining.open()
        await serving(weight_sync, ingest, 2)
        assert running.calls[-2:] == ["load 2", "resume"] and running.calls.count("resume") == 1

    async def test_a_corrupt_newer_version_lets_the_paused_engine_resume(self, weight_sync, log, running, ingest):
        await commit_that_waits(log, running, ingest)
        commit(log, 2, mode="keep")
        flip_a_byte(log, 2, FIRST)
        await ingest.change(version=2)
        await ingest.reported(lambda s: s.state == "stale")
        assert running.calls == ["pause wait", "resume"] and weight_sync.version == 0

    @pytest.mark.parametrize("mode", ["keep", "abort"])
    async def test_a_pause_with_another_mode_overrides_a_waiting_version(self, weight_sync, log, running, ingest, mode):
        await commit_that_waits(log, running, ingest)
        running.loading.close()
        assert (await ingest.order("first", paused=True, pause_mode=mode)).paused
        running.loading.open()
        await serving(weight_sync, ingest, 1)
        assert running.calls == ["pause wait", f"pause {mode}", "load 1"]
        await ingest.order("second", paused=False)
        assert running.calls[-1] == "resume"

    async def test_a_resume_is_obeyed_only_after_a_waiting_version_loads(self, weight_sync, log, running, ingest):
        await pause(ingest, "keep", "first")
        await ingest.reported(lambda s: s.paused)
        await commit_that_waits(log, running, ingest)
        await ingest.change(paused=False, order="second")
        await ingest.reported(lambda s: ingest.seen is not None and ingest.seen.order == "second")
        assert weight_sync.status().obeyed == "first" and "resume" not in running.calls
        running.draining.open()
        await ingest.reported(lambda s: s.obeyed == "second")
        assert running.calls == ["pause keep", "pause wait", "load 1", "resume"]

    async def test_a_waiting_version_is_given_up_when_the_log_is_set_back(self, weight_sync, log, running, ingest):
        before = (log.root / "LATEST").read_bytes()
        await commit_that_waits(log, running, ingest)
        (log.root / "LATEST").write_bytes(before)
        await ingest.order("first", paused=True, pause_mode="keep")
        await ingest.order("second", paused=False)
        assert running.calls == ["pause wait", "pause keep", "resume"] and weight_sync.version == 0

    async def test_a_version_given_up_for_an_unreadable_one_lets_the_engine_resume(self, started, log, running, ingest):
        weight_sync = await started(weights={"poll_s": 60.0, "dead_after_s": 200.0})  # version 1 is not read again
        commit(log, 1)
        flip_a_byte(log, 1, FIRST)
        await ingest.change(version=1)
        await ingest.reported(lambda s: s.state == "stale")
        before = (log.root / "LATEST").read_bytes()
        await push(log, ingest, 2, mode="wait")
        await drains(running)
        (log.root / "LATEST").write_bytes(before)
        await ingest.change(version=1)
        status = await ingest.reported(lambda s: s.state == "stale")
        assert running.calls == ["pause wait", "resume"] and status.error is not None and weight_sync.version == 0

    async def test_a_version_given_up_when_the_ingest_leaves_lets_the_engine_resume(
        self, started, log, running, ingest, monkeypatch
    ):
        answers = iter([None])  # the last one: version 2 is the newest

        async def pinned(_: str) -> None:
            if log.head().version == 2 and next(answers, "away") == "away":
                raise NotReady("the ingest restarts")

        monkeypatch.setattr(ingest, "pinned", pinned)
        weight_sync = await started(group="eval")
        await commit_that_waits(log, running, ingest)
        await push(log, ingest, 2, mode="wait")
        await ingest.reported(lambda s: s.state == "stale")
        assert running.calls == ["pause wait", "resume"] and weight_sync.version == 0
