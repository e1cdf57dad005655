"""Rollouts never wait for the shadow, and what it does not score is counted by reason."""

import asyncio
from collections.abc import Sequence

import pytest

from rollout_service.config import ShadowConfig
from rollout_service.errors import NotReady
from rollout_service.metrics import process, table
from rollout_service.protocol.rollout import Span
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.scoring import ScoreCall
from rollout_service.shadow import feed as feed_module
from rollout_service.shadow.feed import ShadowFeed
from tests.unit.metrics.counts import Counts
from tests.unit.monitor.reports import rollout

PLAIN = Sampling()


class Shadow:
    """Stands where the shadow's deployment would; may be away, or slow."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.unreachable = False
        self.open, self.idle = asyncio.Event(), asyncio.Event()
        self.open.set()

    async def score(self, calls: Sequence[ScoreCall]) -> None:
        await self.open.wait()
        if self.unreachable:
            raise NotReady("it died with this call")
        self.batches.append([call.logprobs[0] for call in calls])


@pytest.fixture
async def shadow() -> Shadow:
    return Shadow()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts = Counts()
    monkeypatch.setattr(process, "sink", counts)
    return counts


def feed_to(shadow: Shadow, share: float = 1.0, max_queue_tokens: int = 1000) -> ShadowFeed:
    return ShadowFeed(shadow, ShadowConfig(share=share, max_queue_tokens=max_queue_tokens))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def not_scored(counts: Counts, outcome: str) -> float:
    return counts.total(table.SHADOW_COMPLETIONS, outcome)


async def test_what_is_sampled_goes_to_the_shadow_in_batches(shadow: Shadow, counts: Counts) -> None:
    feed = feed_to(shadow)
    shadow.open.clear()
    feed.note(rollout("a", [-1.0]), PLAIN)
    await settle()  # on its way
    for name, logprob in (("b", -2.0), ("c", -3.0)):
        feed.note(rollout(name, [logprob]), PLAIN)
    assert counts.values[(table.SHADOW_QUEUE.name,)][-1] == 4
    shadow.open.set()
    await settle()
    assert shadow.batches == [[-1.0], [-2.0, -3.0]]
    assert counts.values[(table.SHADOW_QUEUE.name,)][-1] == 0


async def test_a_batch_is_bounded(shadow: Shadow, counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "BATCH_TOKENS", 5)
    feed = feed_to(shadow)
    for row in ([-1.0], [-2.0], [-3.0], [-4.0] * 9, [-5.0]):
        feed.note(rollout(str(row), row), PLAIN)
    await settle()
    assert shadow.batches == [[-1.0, -2.0], [-3.0], [-4.0], [-5.0]]


async def test_without_a_shadow_or_outside_the_sample_nothing_is_sent(shadow: Shadow, counts: Counts) -> None:
    for feed in (feed_to(shadow, share=0.0), ShadowFeed(None, ShadowConfig())):
        feed.note(rollout("a", [-1.0]), PLAIN)
    await settle()
    assert shadow.batches == [] and counts.values == {}


async def test_other_sampling_and_mixed_versions_are_only_counted(shadow: Shadow, counts: Counts) -> None:
    feed = feed_to(shadow)
    feed.note(rollout("a", [-1.0], [-1.0]), Sampling(temperature=0.5))
    feed.note(rollout("c", [-1.0]), Sampling(temperature=0.5, top_p=0.9))
    whole = rollout("b", [-1.0, -1.0], [-2.0], [])
    first, *others = whole.completions
    halves = (Span(version=7, start=0, end=1), Span(version=8, start=1, end=2))
    feed.note(whole.model_copy(update={"completions": (first.model_copy(update={"spans": halves}), *others)}), PLAIN)
    await settle()
    assert (not_scored(counts, "sampling"), not_scored(counts, "mixed")) == (2, 1)  # one without a token is neither
    assert not_scored(counts, "truncated") == 1
    assert shadow.batches == [[-2.0]]


async def test_a_full_queue_drops_the_new_ones(
    shadow: Shadow, counts: Counts, caplog: pytest.LogCaptureFixture
) -> None:
    feed = feed_to(shadow, max_queue_tokens=6)
    shadow.open.clear()
    feed.note(rollout("first", [-1.0]), PLAIN)
    await settle()
    for i in range(5):
        feed.note(rollout(str(i), [-2.0]), PLAIN)
    assert not_scored(counts, "full") == 2
    assert len(caplog.records) == 1 and "queue is full" in caplog.text
    shadow.open.set()
    await settle()
    assert shadow.batches == [[-1.0], [-2.0] * 3]


async def test_a_shadow_that_is_away_costs_its_rollouts(shadow: Shadow, counts: Counts) -> None:
    feed = feed_to(shadow)
    shadow.unreachable = True
    feed.note(rollout("a", [-1.0], [-1.0]), PLAIN)
    await settle()
    shadow.unreachable = False
    feed.note(rollout("b", [-2.0]), PLAIN)
    await settle()
    assert not_scored(counts, "lost") == 2 and shadow.batches == [[-2.0]]
