"""An engine that gives its memory back, and takes it again with the newest version."""

import pytest

from rollout_service.protocol.fleet import ReplicaStatus
from rollout_service.protocol.weight_log import Control
from tests.unit.engine.fakes import FakeIngest, push, push_until_served, serving
from tests.unit.store.versions import FIRST, commit, flip_a_byte


async def sleep(ingest: FakeIngest, order: str = "sleep", mode: str = "abort") -> ReplicaStatus:
    return await ingest.order(order, paused=True, pause_mode=mode, asleep=True)


AWAKE = {"paused": False, "pause_mode": "keep", "asleep": False}


async def wake(ingest: FakeIngest, order: str = "wake") -> None:
    await ingest.change(order=order, **AWAKE)


async def test_an_engine_that_sleeps_serves_nothing_until_it_wakes_with_the_version_of_before(
    weight_sync, engine, ingest
):
    status = await sleep(ingest)
    assert (status.state, status.version, status.digest, status.paused) == ("asleep", None, None, True)
    assert engine.calls == ["pause abort", "sleep"]
    status = await ingest.order("wake", **AWAKE)
    assert (status.state, status.version, status.paused) == ("ready", 0, False)
    assert engine.calls == ["pause abort", "sleep", "wake up", "pause keep", "load 0", "resume"]


async def test_waking_loads_what_was_committed_meanwhile(weight_sync, log, engine, ingest):
    await sleep(ingest)
    engine.staged.clear()
    await push(log, ingest, 1)
    await push(log, ingest, 2)
    await sleep(ingest, "sleep on")
    assert engine.staged == []  # there is no memory to read it into
    await wake(ingest)
    await serving(weight_sync, ingest, 2)
    assert engine.staged == [2]


async def test_a_resume_waits_until_the_woken_engine_has_weights(weight_sync, engine, ingest):
    await sleep(ingest)
    engine.loading.close()
    await wake(ingest)
    await engine.loading.until_reached()
    status = weight_sync.status()
    # others wait for it by this state: it has served before, and has no version now
    assert (status.state, status.target, status.obeyed) == ("asleep", 0, "sleep") and "resume" not in engine.calls
    engine.loading.open()
    await ingest.reported(lambda s: s.obeyed == "wake")


async def test_an_engine_woken_to_a_corrupt_version_stays_closed_and_may_sleep_again(weight_sync, log, engine, ingest):
    await sleep(ingest)
    commit(log, 1)
    flip_a_byte(log, 1, FIRST)
    await ingest.change(version=1)
    await wake(ingest)
    status = await ingest.reported(lambda s: s.error is not None)
    assert status.version is None and status.obeyed == "sleep" and "resume" not in engine.calls
    status = await sleep(ingest, "again")
    assert (status.state, status.error, status.target) == ("asleep", None, None)
    assert engine.calls == ["pause abort", "sleep", "wake up", "pause abort", "sleep"]
    await wake(ingest, "again awake")
    await push_until_served(weight_sync, log, ingest, 2)
    assert engine.calls[-2:] == ["load 2", "resume"]


async def test_an_engine_whose_memory_is_taken_sleeps_until_it_is_free(weight_sync, engine, ingest):
    await sleep(ingest)
    engine.memory_taken = "the trainer has it"
    await wake(ingest)
    status = await ingest.reported(lambda s: s.error is not None)
    assert (status.state, status.error, status.obeyed) == ("asleep", "the trainer has it", "sleep")
    assert engine.calls == ["pause abort", "sleep"]
    engine.memory_taken = None
    status = await ingest.reported(lambda s: s.obeyed == "wake")
    assert (status.state, status.error) == ("ready", None)


async def test_an_engine_that_sleeps_again_reports_no_failed_waking(weight_sync, engine, ingest):
    await sleep(ingest)
    engine.memory_taken = "the trainer has it"
    await wake(ingest)
    await ingest.reported(lambda s: s.error is not None)
    assert (await sleep(ingest, "again")).error is None


async def test_an_engine_that_sleeps_reports_no_version_that_it_could_not_read(weight_sync, log, engine, ingest):
    engine.reading.close()
    commit(log, 1)
    flip_a_byte(log, 1, FIRST)
    await ingest.change(version=1)
    await engine.reading.until_reached()
    await ingest.change(paused=True, pause_mode="abort", asleep=True, order="sleep")
    await ingest.reported(lambda s: engine.calls == ["pause abort"])
    engine.reading.open()
    await ingest.reported(lambda s: s.obeyed == "sleep" and s.error is not None)
    status = await ingest.reported(lambda s: s.obeyed == "sleep" and s.error is None)
    assert (status.state, status.version) == ("asleep", None)


async def test_sleep_takes_over_from_a_version_that_waits(weight_sync, log, engine, ingest):
    engine.draining.close()
    await push(log, ingest, 1, mode="wait")
    await engine.draining.until_reached()
    await sleep(ingest)
    assert engine.calls == ["pause wait", "pause abort", "sleep"]
    await wake(ingest)
    engine.draining.open()
    await serving(weight_sync, ingest, 1)


@pytest.mark.parametrize("paused", [False, True])
async def test_sleep_waits_for_running_rollouts_if_asked_to_unless_paused(weight_sync, engine, ingest, paused):
    engine.draining.close()
    if paused:
        await ingest.order("pause", paused=True, pause_mode="keep")
    await ingest.change(paused=True, pause_mode="keep" if paused else "wait", asleep=True, order="sleep")
    if not paused:
        await engine.draining.until_reached()
        assert engine.calls == ["pause wait"]
        engine.draining.open()
    await ingest.reported(lambda s: s.obeyed == "sleep")
    assert engine.calls == ["pause keep" if paused else "pause wait", "sleep"]
    await ingest.order("wake", **AWAKE)
    assert engine.calls[2:] == ["wake up", "pause keep", "load 0", "resume"]


async def test_an_engine_that_starts_while_the_others_sleep_joins_them(follower, log, engine, ingest):
    control = Control(paused=True, mode="abort", asleep=("weights", "kv_cache"), order="sleep")
    log.set_control(control)
    await ingest.change(paused=True, pause_mode="abort", asleep=True, order="sleep")
    weight_sync = follower()
    await weight_sync.start()
    assert weight_sync.status().obeyed == ""
    assert (await ingest.reported(lambda s: s.obeyed == "sleep")).state == "asleep"
    assert engine.calls[-1] == "sleep" and "resume" not in engine.calls


async def test_sleep_ordered_while_a_version_is_read_pauses_at_once_and_comes_before_the_load(
    weight_sync, log, engine, ingest
):
    engine.reading.close()
    await push(log, ingest, 1)
    await engine.reading.until_reached()
    await ingest.change(paused=True, pause_mode="abort", asleep=True, order="sleep")
    await ingest.reported(lambda s: engine.calls == ["pause abort"])
    assert weight_sync.status().obeyed != "sleep"
    engine.reading.open()
    status = await ingest.reported(lambda s: s.obeyed == "sleep")
    assert (status.state, engine.calls) == ("asleep", ["pause abort", "sleep"])
    await wake(ingest)
    await serving(weight_sync, ingest, 1)


async def test_a_wait_of_a_sleeping_engine_runs_nothing(weight_sync, engine, ingest):
    await sleep(ingest, mode="keep")
    await sleep(ingest, "again", mode="wait")
    assert engine.calls == ["pause keep", "sleep", "pause keep"]


async def test_a_waiting_version_runs_nothing_before_its_load(weight_sync, log, engine, ingest):
    await sleep(ingest, mode="keep")
    await push(log, ingest, 1, mode="wait")
    await wake(ingest)
    await serving(weight_sync, ingest, 1)
    assert engine.calls == ["pause keep", "sleep", "wake up", "pause keep", "load 1", "resume"]


async def test_a_wait_ordered_of_a_woken_engine_begins_after_the_load(weight_sync, engine, ingest):
    await sleep(ingest, mode="keep")
    engine.reading.close()
    await wake(ingest)
    await engine.reading.until_reached()
    await ingest.change(order="wait", paused=True, pause_mode="wait", abort=7)
    await ingest.reported(lambda s: s.aborted == 7)
    assert engine.calls == ["pause keep", "sleep", "wake up", "abort", "pause keep"]
    engine.reading.open()
    await ingest.reported(lambda s: s.obeyed == "wait")
    assert engine.calls[5:] == ["pause keep", "load 0", "pause wait"]
