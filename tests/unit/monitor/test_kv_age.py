"""How ``weights.kv_max_age: auto`` follows the mismatch by age."""

import torch

from rollout_service.config import MonitorConfig
from rollout_service.monitor.judge import Judge
from rollout_service.monitor.kv_age import KVAgeLimit
from rollout_service.monitor.statistics import Statistics
from rollout_service.monitor.table import Key, VersionTable

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
    assert reports.choose(2) == 0
    reports.add(2, age=0)
    assert reports.choose(3) == 1


def test_replicas_that_load_one_version_get_one_answer():
    reports = Reports()
    assert reports.choose(1) == 1
    reports.add(1, age=1)
    assert reports.choose(1) == 1
    assert reports.choose(2) == reports.choose(2) == 2


def test_numbers_that_go_down_count_anew():
    reports = Reports()
    reports.choose(50)
    reports.add(50, age=1)
    assert reports.choose(51) == 2
    assert reports.choose(3) == 2
    reports.add(3, age=2)
    assert reports.choose(4) == 3
