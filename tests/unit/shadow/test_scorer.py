"""What is compared is always one version with itself."""

import logging

import pytest

from rollout_service.config import MonitorConfig
from rollout_service.errors import NonFiniteLogprob
from rollout_service.metrics import process, table
from rollout_service.monitor.monitor import Monitor
from rollout_service.protocol.scoring import ScoreCall
from rollout_service.shadow.scorer import Scorer
from tests.unit.metrics.counts import Counts

PROMPT = (9, 8, 7)
MAX_MODEL_LEN = 8


class Engine:
    """Gives the token ``t`` the logprob ``-t``."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.scored: list[tuple[int, ...]] = []

    async def score(self, request_id: str, token_ids: tuple[int, ...]) -> tuple[tuple[float, ...], int]:
        self.scored.append(token_ids)
        if 99 in token_ids:
            raise NonFiniteLogprob("token 1 of the prompt has logprob nan")
        return tuple(-float(token) for token in token_ids[1:]), self.version


class WeightSync:
    """At one version, or at a newer one once that is waited for."""

    def __init__(self, version: int | None, coming: int | None = None) -> None:
        self.version, self._coming = version, coming
        self.waits: list[float] = []

    def holds(self, version: int) -> bool:
        return self.version == version

    async def wait_version(self, version: int, timeout_s: float) -> bool:
        if self.version is not None and self.version >= version:
            return True
        self.waits.append(timeout_s)
        if self._coming is not None and timeout_s:
            self.version = self._coming
        return self.version is not None and self.version >= version


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts = Counts()
    monkeypatch.setattr(process, "sink", counts)
    return counts


def call(version: int, *tokens: int, replica: str = "r1", off: float = 0.0) -> ScoreCall:
    logprobs = tuple(off - float(token) for token in tokens)
    return ScoreCall(version=version, replica_id=replica, prompt_token_ids=PROMPT, token_ids=tokens, logprobs=logprobs)


async def scored(weight_sync: WeightSync, engine: Engine, *calls: ScoreCall) -> Monitor:
    monitor = Monitor(MonitorConfig())
    await Scorer(engine, weight_sync, monitor, 30.0, MAX_MODEL_LEN).score(calls)
    return monitor


async def test_each_replica_is_compared_with_the_reference_by_token(counts: Counts) -> None:
    monitor = await scored(WeightSync(3), Engine(3), call(3, 1, 2), call(3, 4), call(3, 5, 6, replica="r2", off=0.25))
    rows = {row.replica_id: row for row in await monitor.rows()}
    assert {(row.version, row.source) for row in rows.values()} == {(3, "shadow")}
    assert (rows["r1"].tokens, rows["r1"].sequences, rows["r1"].k3) == (3, 2, 0.0)
    assert (rows["r2"].tokens, rows["r2"].k1) == (2, pytest.approx(0.25))
    assert counts.total(table.SHADOW_COMPLETIONS, "scored") == 3


async def test_a_newer_version_is_waited_for(counts: Counts) -> None:
    weight_sync = WeightSync(2, coming=3)
    monitor = await scored(weight_sync, Engine(3), call(3, 1))
    assert weight_sync.waits == [30.0] and [row.version for row in await monitor.rows()] == [3]


async def test_an_older_version_is_not_compared_with_a_newer_one(counts: Counts) -> None:
    monitor = await scored(WeightSync(4), Engine(4), call(3, 1), call(4, 1))
    assert [row.version for row in await monitor.rows()] == [4]
    assert counts.total(table.SHADOW_COMPLETIONS, "version") == 1


async def test_a_version_that_changes_while_it_scores_is_not_compared(counts: Counts) -> None:
    monitor = await scored(WeightSync(3), Engine(4), call(3, 1))
    assert await monitor.rows() == []
    assert counts.total(table.SHADOW_COMPLETIONS, "version") == 1


async def test_a_version_that_never_comes_is_waited_for_once(counts: Counts, caplog: pytest.LogCaptureFixture) -> None:
    weight_sync, engine = WeightSync(2), Engine(2)
    scorer = Scorer(engine, weight_sync, Monitor(MonitorConfig()), 30.0, MAX_MODEL_LEN)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await scorer.score([call(3, 1)])
    assert weight_sync.waits == [30.0, 0.0, 0.0] and engine.scored == []
    assert len(caplog.records) == 1 and "version 3" in caplog.text


async def test_a_full_context_is_scored_without_its_last_token(counts: Counts) -> None:
    engine = Engine(3)
    monitor = await scored(WeightSync(3), engine, call(3, 1, 2, 3, 4, 5))
    assert engine.scored == [(*PROMPT, 1, 2, 3, 4)]
    assert [row.tokens for row in await monitor.rows()] == [4]


async def test_one_that_cannot_be_scored_does_not_cost_the_others(counts: Counts) -> None:
    monitor = await scored(WeightSync(3), Engine(3), call(3, 99), call(3, 1))
    assert [row.tokens for row in await monitor.rows()] == [1]
    assert counts.total(table.SHADOW_COMPLETIONS, "failed") == 1
