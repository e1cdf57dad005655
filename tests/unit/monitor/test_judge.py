"""When a row turns suspect, and when it is cleared."""

import logging
import math
import time

from rollout_service.config import MonitorConfig
from rollout_service.monitor.judge import Judge
from rollout_service.monitor.statistics import Statistics
from rollout_service.monitor.table import Entry, Key
from tests.unit.monitor.batches import statistics_of

KEY = Key(12, "engine#3")
LOGGER = "rollout_service.monitor.judge"


def off_by(nats: float, tokens: int = 100) -> Statistics:
    return statistics_of([[(-2.0, -2.0 - nats)] * tokens])


def judged(statistics: Statistics, entry: Entry | None = None, **config: float) -> Entry:
    entry = entry or Entry()
    entry.statistics = statistics
    Judge(MonitorConfig(**{"min_tokens": 100, **config})).judge(KEY, entry)
    return entry


def test_a_row_beyond_k3_is_suspect_from_now_on():
    before = time.time()
    since = judged(off_by(0.5)).suspect_since
    assert since is not None and before <= since <= time.time()


def test_either_threshold_is_enough():
    k3, prob_error = math.expm1(0.1) - 0.1, math.exp(0.1)
    assert judged(off_by(0.1), suspect_k3=k3 * 1.01, suspect_prob_error=prob_error * 1.01).suspect_since is None
    assert judged(off_by(0.1), suspect_k3=k3 * 0.99, suspect_prob_error=prob_error * 1.01).suspect_since is not None
    assert judged(off_by(0.1), suspect_k3=k3 * 1.01, suspect_prob_error=prob_error * 0.99).suspect_since is not None


def test_one_outlier_makes_no_version_suspect():
    outlier = (-18.0, -2.0)  # the engine sampled what the trainer finds improbable
    assert judged(statistics_of([[(-2.0, -2.0)] * 2000 + [outlier]])).suspect_since is None
    assert judged(statistics_of([[(-2.0, -2.0)] * 2000 + [outlier] * 20])).suspect_since is not None


def test_too_few_tokens_are_not_judged():
    assert judged(off_by(0.5, tokens=99)).suspect_since is None
    assert judged(off_by(0.5, tokens=100)).suspect_since is not None


def test_a_row_at_the_edge_does_not_flap():
    def at(share: float) -> Statistics:
        return off_by(math.log1p(0.05 * share))  # of a probability error of 1.05

    entry = judged(at(1.01))
    since = entry.suspect_since
    assert since is not None
    for share in (0.99, 1.01, 0.81, 1.2):
        assert judged(at(share), entry).suspect_since == since
    assert judged(at(0.79), entry).suspect_since is None
    assert judged(at(0.99), entry).suspect_since is None


def test_a_suspect_replica_and_its_recovery_are_each_logged_once(caplog):
    with caplog.at_level(logging.WARNING, LOGGER):
        entry = judged(off_by(0.5))
        judged(off_by(0.5), entry)
        judged(off_by(0.0), entry)
        judged(off_by(0.0), entry)
    turned, cleared = [record.getMessage() for record in caplog.records]
    assert "weight version 12 on replica engine#3 is suspect since 20" in turned
    assert "k3 0.1487 (threshold 0.01)" in turned and "over 100 tokens" in turned
    assert "weight version 12 on replica engine#3 is not suspect any more" in cleared


def test_a_good_row_leaves_no_line(caplog):
    with caplog.at_level(logging.WARNING, LOGGER):
        assert judged(off_by(0.01)).suspect_since is None
    assert caplog.records == []
