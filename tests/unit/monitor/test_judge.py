"""When a row turns suspect and is cleared, and how ``weights.kv_max_age: auto`` follows the mismatch by age."""

import logging
import math
import time

import torch

from rollout_service.config import MonitorConfig
from rollout_service.monitor.judge import Judge, KVAgeLimit
from rollout_service.monitor.statistics import Statistics
from rollout_service.monitor.table import Entry, Key, VersionTable
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


def test_either_threshold_is_enough():
    k3, prob_error = math.expm1(0.1) - 0.1, math.exp(0.1)
    assert judged(off_by(0.1), suspect_k3=k3 * 1.01, suspect_prob_error=prob_error * 1.01).suspect_since is None
    assert judged(off_by(0.1), suspect_k3=k3 * 0.99, suspect_prob_error=prob_error * 1.01).suspect_since is not None
    assert judged(off_by(0.1), suspect_k3=k3 * 1.01, suspect_prob_error=prob_error * 0.99).suspect_since is not None


def test_one_outlier_makes_no_version_suspect():
    outlier = (-18.0, -2.0)  # the engine sampled what the trainer finds improbable
    assert judged(statistics_of([[(-2.0, -2.0)] * 2000 + [outlier]])).suspect_since is None
    assert judged(statistics_of([[(-2.0, -2.0)] * 2000 + [outlier] * 20])).suspect_since is not None


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
    before = time.time()
    with caplog.at_level(logging.WARNING, LOGGER):
        assert judged(off_by(0.01)).suspect_since is None
        assert judged(off_by(0.5, tokens=99)).suspect_since is None  # too few
        entry = judged(off_by(0.5))
        assert entry.suspect_since is not None and before <= entry.suspect_since <= time.time()
        judged(off_by(0.5), entry)
        judged(off_by(0.0), entry)
        judged(off_by(0.0), entry)
    turned, cleared = [record.getMessage() for record in caplog.records]
    assert "weight version 12 on replica engine#3 is suspect since 20" in turned
    assert "k3 0.1487 (threshold 0.01)" in turned and "over 100 tokens" in turned
    assert "weight version 12 on replica engine#3 is no longer suspect" in cleared


TOKENS = 100


class Reports:
    """A limit, and the tokens that are reported to it."""

    def __init__(self) -> None:
        self.limit = KVAgeLimit(Judge(MonitorConfig(min_tokens=TOKENS)))
        self.table = VersionTable(keep_versions=64)

    def add(self, version: int, age: int, nats: float = 0.0, tokens: int = TOKENS) -> None:
        """Report tokens whose logprobs differ from the trainer's by ``nats``."""
        ratios = torch.full((tokens,), nats, dtype=torch.float64)
        self.table.add(Key(version, "r1"), Statistics.of(ratios, ratios[:0], 2.0, {age: ratios}))

    def choose(self, version: int) -> int:
        return self.limit.choose(version, self.table)


def test_age_grows_by_one_while_the_oldest_are_harmless():
    reports = Reports()
    assert reports.limit.chosen is None
    assert reports.choose(1) == 1
    for version in range(1, 6):
        reports.add(version, age=version)
        assert reports.choose(version + 1) == version + 1
    assert reports.limit.chosen == 6


def test_age_stays_without_enough_tokens_of_that_age():
    reports = Reports()
    reports.choose(1)
    reports.add(1, age=0)
    reports.add(1, age=1, tokens=TOKENS - 1)
    assert reports.choose(2) == 1
    reports.add(2, age=1, tokens=1)  # versions under one bound count together
    assert reports.choose(3) == 2


def test_harmful_age_halves_the_bound_and_old_tokens_are_forgotten():
    reports = Reports()
    for version in range(1, 8):
        reports.choose(version)
        reports.add(version, age=version)
    assert reports.choose(8) == 8
    reports.add(8, age=8)
    reports.add(8, age=5, nats=0.5)
    assert reports.choose(9) == 2
    assert reports.choose(10) == 2
    reports.add(10, age=2)
    assert reports.choose(11) == 3


def test_harmful_newest_keys_recompute_everything_until_they_are_not():
    reports = Reports()
    reports.choose(1)
    reports.add(1, age=0, nats=0.5)
    assert reports.choose(1) == 1  # replicas that load one version get one answer
    assert reports.choose(2) == 0
    reports.add(2, age=0)
    assert reports.choose(3) == 1


def test_numbers_that_go_down_count_anew():
    reports = Reports()
    reports.choose(50)
    reports.add(50, age=1)
    assert reports.choose(51) == 2
    assert reports.choose(3) == 2
    reports.add(3, age=2)
    assert reports.choose(4) == 3


def test_a_replica_one_version_behind_changes_no_answer():
    reports = Reports()
    reports.choose(1)
    reports.add(1, age=1)
    assert reports.choose(2) == 2
    reports.add(2, age=2)
    assert [reports.choose(1), reports.choose(2)] == [1, 2]
    assert reports.choose(3) == 3
