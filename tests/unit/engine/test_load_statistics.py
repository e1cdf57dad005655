"""What a replica tells the autoscaler, also when the engine has said nothing for a while."""

import pytest

from rollout_service.fleet.autoscaling import KV_USAGE, RUNNING, SERVING, VERSION, WAITING
from rollout_service.protocol.fleet import EngineLoad, ReplicaStatus

pytest.importorskip("vllm")

from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

from rollout_service.engine import load_statistics
from rollout_service.engine.load_statistics import (
    QUEUE_FRESH_S,
    GatewayQueues,
    SchedulerLog,
    autoscaling_stats,
    watch_kv_reads,
)
from rollout_service.metrics import process, table
from tests.unit.metrics.counts import Counts

STEP = SchedulerStats(num_running_reqs=5, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.25)


@pytest.fixture
def log() -> SchedulerLog:
    log = SchedulerLog()
    log.record(STEP, None)
    return log


def status(**changes: object) -> ReplicaStatus:
    return ReplicaStatus.model_validate({"replica_id": "a", "version": 7, "state": "ready", "running": 8, **changes})


def test_the_numbers_of_the_last_step_are_told(log):
    assert autoscaling_stats(status(), log) == {RUNNING: 5, WAITING: 3, KV_USAGE: 0.25, VERSION: 7, SERVING: 1}


def step_with(preempted: int = 0, *finished: FinishedRequestStats) -> IterationStats:
    stats = IterationStats()
    stats.num_preempted_reqs = preempted
    stats.finished_requests = list(finished)
    return stats


def test_dropping_the_cache_counts_as_no_preemption(log):
    log.record(STEP, step_with(2))
    log.drop_cache()  # 5 requests run, and vLLM reports each when it samples again
    for preempted in (3, 1, 4):
        log.record(STEP, step_with(preempted))
    assert log.preemptions == 2 + 3


def test_prefill_speed_is_that_of_long_prefills(log):
    short = FinishedRequestStats("stop", num_prompt_tokens=9000, num_cached_tokens=8900, prefill_time=1.0)
    log.record(STEP, step_with(0, short))
    assert log.prefill_tokens_per_s == 0
    for seconds in (2.0, 1.0):
        long = FinishedRequestStats("stop", num_prompt_tokens=9000, num_cached_tokens=1000, prefill_time=seconds)
        log.record(STEP, step_with(0, short, long))
    assert log.prefill_tokens_per_s == 4000 + (8000 - 4000) / 8


def test_decode_step_is_that_of_undisturbed_requests(log):
    for step_s in (0.0, 0.01, *[0.1] * 8):
        log.record(STEP, step_with(0, FinishedRequestStats("stop", mean_time_per_output_token=step_s)))
    assert 0.01 < log.decode_step_s < 0.025
    for _ in range(8):
        log.record(STEP, step_with(0, FinishedRequestStats("stop", mean_time_per_output_token=0.005)))
    assert log.decode_step_s < 0.007


def test_what_waits_in_the_gateways_is_told_while_they_say_so(log):
    now = 0.0
    queues = GatewayQueues(lambda: now)
    queues.note("a", 100)
    queues.note("b", 7)
    queues.note("a", 50)
    assert autoscaling_stats(status(), log, queues.sequences())[WAITING] == 3 + 57
    now = QUEUE_FRESH_S
    queues.note("b", 0)
    assert queues.sequences() == 50
    now += 0.1
    assert queues.sequences() == 0


def test_a_step_without_numbers_leaves_those_of_the_one_before(log):
    log.record(None, None)
    assert log.load(admitted=8)[RUNNING] == 5


def test_nothing_is_held_after_the_last_answer_despite_old_stats(log):
    assert log.load(admitted=0) == {RUNNING: 0, WAITING: 0, KV_USAGE: 0}


def test_what_was_admitted_counts_when_the_last_step_is_old(log, monkeypatch):
    monkeypatch.setattr(load_statistics, "FRESH_S", -1.0)
    assert log.load(admitted=40) == {RUNNING: 0, WAITING: 40, KV_USAGE: 0.25}


def test_what_was_admitted_counts_before_the_first_step():
    assert SchedulerLog().load(admitted=40)[WAITING] == 40


@pytest.mark.parametrize(
    "change",
    [{"state": "syncing", "target": 8}, {"state": "stale"}, {"paused": True}, {"error": "half loaded"}],
    ids=lambda change: next(iter(change)),
)
def test_a_replica_that_is_not_ready_is_not_serving(log, change):
    assert autoscaling_stats(status(**change), log)[SERVING] == 0


def test_serve_takes_every_value_for_a_number(log):
    values = autoscaling_stats(status(version=None, state="starting"), log).values()
    assert all(isinstance(value, (int, float)) for value in values)


def test_reports_tell_capacity_from_other_reasons_to_wait(log):
    load = EngineLoad(running=5, waiting=2, deferred=1, kv_cache_usage=0.25, kv_cache_tokens=512)
    assert log.engine_load(admitted=8, kv_cache_tokens=512) == load
    idle = EngineLoad(running=0, waiting=0, deferred=0, kv_cache_usage=0.0, kv_cache_tokens=512)
    assert log.engine_load(admitted=0, kv_cache_tokens=512) == idle


def test_what_a_paused_engine_holds_is_reported_as_deferred(log, monkeypatch):
    monkeypatch.setattr(load_statistics, "FRESH_S", -1.0)
    held = EngineLoad(running=0, waiting=0, deferred=8, kv_cache_usage=0.25, kv_cache_tokens=512)
    assert log.engine_load(admitted=8, kv_cache_tokens=512) == held


async def test_what_attention_reads_counts_from_the_first_answer_on(monkeypatch):
    counts = Counts()
    monkeypatch.setattr(process, "sink", counts)

    answers = [(0, 0), (1000, 0), (1500, 300), (1500, 300), (4000, 2300)]  # what vLLM's own runs read comes first

    class Engine:
        """Dead at the end."""

        async def kv_reads(self) -> tuple[int, int]:
            if not answers:
                raise EngineDeadError
            return answers.pop(0)

    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    await watch_kv_reads(Engine(), sleep)
    assert counts.total(table.DECODE_KV_TOKENS) == 3000
    assert counts.total(table.DECODE_KV_TOKENS_SPARED) == 2300
    assert slept == [load_statistics.KV_READS_PERIOD_S] * 5
