"""What a replica tells the autoscaler, also when the engine has said nothing for a while."""

import pytest
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
from rollout_service.fleet.autoscaling import KV_USAGE, RUNNING, SERVING, VERSION, WAITING
from rollout_service.metrics import process, table
from rollout_service.protocol.fleet import EngineLoad, ReplicaStatus
from tests.unit.metrics.counts import Counts

STEP = SchedulerStats(num_running_reqs=5, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.25)


@pytest.fixture
def log() -> SchedulerLog:
    log = SchedulerLog()
    log.record(STEP, None)
    return log


def status(**changes: object) -> ReplicaStatus:
    return ReplicaStatus.model_validate({"replica_id": "a", "version": 7, "state": "ready", "running": 8, **changes})


def load(running: int, waiting: int, deferred: int, usage: float) -> EngineLoad:
    return EngineLoad(running=running, waiting=waiting, deferred=deferred, kv_cache_usage=usage, kv_cache_tokens=512)


def test_the_load_is_that_of_the_last_step_while_that_is_new_and_something_runs(log, monkeypatch):
    log.record(None, None)  # a step without numbers leaves those of the one before
    assert log.load(8, 512) == load(5, 2, 1, 0.25)
    assert log.load(0, 512) == load(0, 0, 0, 0.0)
    monkeypatch.setattr(load_statistics, "FRESH_S", -1.0)
    assert log.load(40, 512) == load(0, 0, 40, 0.25)  # of a paused engine
    assert SchedulerLog().load(40, 512).deferred == 40


def test_the_autoscaler_hears_of_the_load_and_of_what_waits_in_the_gateways():
    stats = autoscaling_stats(status(), load(5, 2, 1, 0.25), queued=57)
    assert stats == {RUNNING: 5, WAITING: 3 + 57, KV_USAGE: 0.25, VERSION: 7, SERVING: 1}
    starting = autoscaling_stats(status(version=None, state="starting"), load(0, 0, 0, 0.0))
    assert all(isinstance(value, float) for value in starting.values())  # Serve stops asking otherwise


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


def test_reports_of_gateways_count_while_they_are_new():
    now = 0.0
    queues = GatewayQueues(lambda: now)
    queues.note("a", 100)
    queues.note("b", 7)
    queues.note("a", 50)
    assert queues.sequences() == 57
    now = QUEUE_FRESH_S
    queues.note("b", 0)
    assert queues.sequences() == 50
    now += 0.1
    assert queues.sequences() == 0


@pytest.mark.parametrize(
    "change",
    [{"state": "syncing", "target": 8}, {"state": "stale"}, {"paused": True}, {"error": "half loaded"}],
    ids=lambda change: next(iter(change)),
)
def test_a_replica_that_is_not_ready_is_not_serving(change):
    assert autoscaling_stats(status(**change), load(0, 0, 0, 0.0))[SERVING] == 0


async def test_what_attention_reads_counts_from_the_first_answer_on(monkeypatch):
    counts = Counts()
    monkeypatch.setattr(process, "sink", counts)

    answers = [(0, 0), (1000, 0), (1500, 300), (1500, 300), (4000, 2300)]  # what vLLM's own runs read comes first

    async def kv_reads() -> tuple[int, int]:
        if not answers:
            raise EngineDeadError
        return answers.pop(0)

    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    await watch_kv_reads(kv_reads, sleep)
    assert counts.total(table.DECODE_KV_TOKENS) == 3000
    assert counts.total(table.DECODE_KV_TOKENS_SPARED) == 2300
    assert slept == [load_statistics.KV_READS_PERIOD_S] * 5
