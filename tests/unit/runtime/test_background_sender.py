"""What is told in the background: in order, in batches, and never at the expense of who tells it."""

import asyncio
import contextvars
import gc
from dataclasses import dataclass, field

import pytest

from rollout_service.errors import NotReady
from rollout_service.runtime.background_sender import FULL, BackgroundSender

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("REQUEST")


@dataclass(frozen=True)
class Item:
    name: str
    cost_tokens: int = 1


@dataclass
class Told:
    """What came out of an outbox."""

    batches: list[list[str]] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    arrived: int = 0
    in_a_request: bool = False
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    async def send(self, batch: list[Item]) -> None:
        self.in_a_request = REQUEST in contextvars.copy_context()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.batches.append([item.name for item in batch])

    def note_arrival(self) -> None:
        self.arrived += 1


def sender(told: Told, room: int = 100, batch: int = 4, send_s: float = 60.0) -> BackgroundSender[Item]:
    return BackgroundSender(
        told.send,
        lambda count, why: told.dropped.append((count, why)),
        sent=told.note_arrival,
        room_tokens=room,
        batch_tokens=batch,
        send_s=send_s,
    )


async def test_batches_keep_order_and_size_unless_one_item_is_larger() -> None:
    told = Told()
    told.gate.set()
    box = sender(told)
    for item in (Item("a", 2), Item("b", 2), Item("c", 1), Item("d", 9), Item("e", 1)):
        box.put(item)
    await box.flushed(60)
    assert told.batches == [["a", "b"], ["c"], ["d"], ["e"]]
    assert told.arrived == 4 and told.dropped == []


async def test_overflow_is_dropped_and_items_in_flight_take_no_room() -> None:
    told = Told()
    box = sender(told, room=3)
    box.put(Item("first", 3))
    await asyncio.sleep(0)
    for name in "abcd":
        box.put(Item(name))
    assert told.dropped == [(1, FULL)]
    told.gate.set()
    await box.flushed(60)
    assert told.batches == [["first"], ["a", "b", "c"]]


@pytest.mark.parametrize("late", [False, True])
async def test_an_undelivered_batch_is_dropped_and_the_next_is_sent(late: bool) -> None:
    told = Told(error=None if late else NotReady("it died with this call"))
    box = sender(told, batch=2, send_s=0.01 if late else 60)
    box.put(Item("a"))
    box.put(Item("b"))
    if not late:
        told.gate.set()
    await box.flushed(60)
    assert [count for count, _ in told.dropped] == [2] and told.batches == []
    told.error = None
    told.gate.set()
    box.put(Item("c"))
    await box.flushed(60)
    assert told.batches == [["c"]] and told.arrived == 1


async def test_nothing_is_sent_in_the_context_of_the_enqueuing_request() -> None:
    told = Told()
    told.gate.set()
    REQUEST.set("x")
    box = sender(told)
    box.put(Item("a"))
    await box.flushed(60)
    assert told.batches == [["a"]] and not told.in_a_request


async def test_a_bug_is_not_mistaken_for_an_unavailable_deployment(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(error=KeyError("ours"))
    told.gate.set()
    box = sender(told)
    box.put(Item("a"))
    await box.flushed(60)
    assert told.dropped == [] and told.arrived == 0
    del told, box
    gc.collect()  # asyncio says it when the task goes: here, not within another test's ast.parse, which breaks on that
    assert "KeyError: 'ours'" in caplog.text
