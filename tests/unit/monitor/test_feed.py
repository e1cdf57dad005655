"""Rollouts never wait for the monitor, and what it was not told of is counted and said once."""

import asyncio
import contextvars
import logging
from collections.abc import Sequence

import pytest

from rollout_service.errors import NotReady
from rollout_service.monitor.feed import QUEUE_TOKENS, RolloutFeed
from rollout_service.protocol.recent_rollout import RecentRollout
from tests.unit.monitor.reports import rollout

LOGGER = "rollout_service.monitor.feed"
REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("REQUEST")


class Listener:
    """Stands where the monitor's deployment would; may be away, or slow."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.unreachable = self.is_in_a_request = False
        self.open = asyncio.Event()
        self.open.set()

    async def remember(self, rollouts: Sequence[RecentRollout]) -> None:
        self.is_in_a_request = REQUEST in contextvars.copy_context()
        await self.open.wait()
        if self.unreachable:
            raise NotReady("it died with this call")
        self.batches.append([rollout.request_id for rollout in rollouts])

    @property
    def told(self) -> list[str]:
        return [request_id for batch in self.batches for request_id in batch]


@pytest.fixture
async def listener() -> Listener:
    return Listener()


def feed_to(listener: Listener, remember_tokens: int = 1) -> RolloutFeed:
    return RolloutFeed(listener, remember_tokens)


async def test_what_was_noted_is_told_in_order_and_together(listener: Listener) -> None:
    feed = feed_to(listener)
    listener.open.clear()
    feed.note(rollout("a", [-1.0]))
    await asyncio.sleep(0)
    for name in "bcd":
        feed.note(rollout(name, [-1.0]))
    listener.open.set()
    await feed.wait_until_sent()
    assert listener.batches == [["a"], ["b", "c", "d"]]
    feed.note(rollout("e", [-1.0]))
    await feed.wait_until_sent()
    assert listener.told == ["a", "b", "c", "d", "e"] and feed.dropped == 0


async def test_a_service_that_remembers_nothing_tells_nothing(listener: Listener) -> None:
    feed = feed_to(listener, remember_tokens=0)
    feed.note(rollout("a", [-1.0]))
    await feed.wait_until_sent()
    assert listener.batches == []


async def test_a_monitor_that_is_away_costs_its_rollouts_and_one_line(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    feed = feed_to(listener)
    listener.unreachable = True
    with caplog.at_level(logging.WARNING, LOGGER):
        for name in "abc":
            feed.note(rollout(name, [-1.0]))
            await feed.wait_until_sent()
        assert feed.dropped == 3
        listener.unreachable = False
        feed.note(rollout("d", [-1.0]))
        await feed.wait_until_sent()
    assert listener.told == ["d"]
    unreachable, back = [record.getMessage() for record in caplog.records]
    assert "not told of rollouts" in unreachable and "missed 3" in back


async def test_a_slow_monitor_costs_only_what_the_queue_cannot_hold(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    feed = feed_to(listener)
    listener.open.clear()
    each = RecentRollout.of(rollout("x", [-1.0])).cost_tokens
    feed.note(rollout("first", [-1.0]))
    await asyncio.sleep(0)  # it is on its way, and not in the queue any more
    fits = QUEUE_TOKENS // each
    with caplog.at_level(logging.WARNING, LOGGER):
        for i in range(fits + 100):
            feed.note(rollout(str(i), [-1.0]))
    assert feed.dropped == 100 and len(caplog.records) == 1
    listener.open.set()
    await feed.wait_until_sent()
    assert len(listener.told) == 1 + fits


async def test_a_monitor_that_hangs_loses_a_batch_and_gets_the_next(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_service.monitor.feed.SEND_S", 0.01)
    feed = feed_to(listener)
    listener.open.clear()
    feed.note(rollout("a", [-1.0]))
    await feed.wait_until_sent()
    assert feed.dropped == 1 and listener.batches == []
    listener.open.set()
    feed.note(rollout("b", [-1.0]))
    await feed.wait_until_sent()
    assert listener.told == ["b"]


async def test_nothing_is_sent_in_the_context_of_a_request(listener: Listener) -> None:
    REQUEST.set("x")
    feed = feed_to(listener)
    feed.note(rollout("a", [-1.0]))
    await feed.wait_until_sent()
    assert listener.told == ["a"] and not listener.is_in_a_request
