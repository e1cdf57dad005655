"""Calls leave the queue in their order, within its bounds, and when there is room."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from rollout_service.errors import Overloaded
from rollout_service.fleet import queue as queue_module
from rollout_service.fleet.queue import RETRIED_CALLS, RETRY_S, DispatchQueue
from tests.unit.ingest.trainer import settle


class Fleet:
    """Room for calls, and the calls that a test makes."""

    def __init__(self, room: int, max_sequences: int = 10_000, max_bytes: int = 1 << 30) -> None:
        self.room, self.sent, self.timers = room, list[str](), list[tuple[float, Callable[[], None]]]()
        self.queue = DispatchQueue(
            lambda: self.room, max_sequences, max_bytes, later=lambda after_s, call: self.timers.append((after_s, call))
        )
        self._ends = dict[str, asyncio.Event]()
        self.tasks = dict[str, asyncio.Task[None]]()

    async def call(self, name: str, n: int = 1, priority: int = 0, *, refuse: str = "", nbytes: int = 1) -> None:
        """Send a call; each letter of ``refuse`` is a refusal: f for full, v for a version, m for memory."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, n, priority, refuse, nbytes))
        await settle()

    async def _run(self, name: str, n: int, priority: int, refuse: str, nbytes: int) -> None:
        ticket = self.queue.ticket(priority)
        for rounds in range(len(refuse) + 1):
            lacks_memory = rounds > 0 and refuse[rounds - 1] == "m"
            async with self.queue.turn(ticket, n, nbytes, rounds, lacks_memory=lacks_memory) as turn:
                self.sent.append(name)
                if rounds == len(refuse):
                    await self._ends[name].wait()
                else:
                    turn.was_refused, turn.is_full = True, refuse[rounds] == "f"

    async def end(self, name: str) -> None:
        """Have the fleet answer a call."""
        self._ends[name].set()
        await self.tasks[name]
        await settle()

    async def fire(self) -> None:
        """Let the time of all timers come."""
        due, self.timers = self.timers, []
        for _, call in due:
            call()
        await settle()


@asynccontextmanager
async def fleet(room: int, **bounds: int) -> AsyncIterator[Fleet]:
    made = Fleet(room, **bounds)
    yield made
    for task in made.tasks.values():
        task.cancel()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)
    assert (made.queue.sequences, made.queue.nbytes) == (0, 0)


async def test_waiting_calls_go_by_priority_and_then_arrival():
    async with fleet(1) as f:
        await f.call("running")
        for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -3)):
            await f.call(name, priority=priority)
        for name in ("running", "urgent", "first", "second"):
            await f.end(name)
        assert f.sent == ["running", "urgent", "first", "second", "late"]


async def test_small_calls_do_not_overtake_a_large_one():
    async with fleet(4) as f:
        await f.call("running", n=4)
        await f.call("large", n=4096)
        for i in range(5):
            await f.call(f"small{i}")
        await f.end("running")
        assert f.sent == ["running", "large"]
        await f.end("large")
        assert f.sent[2:] == ["small0", "small1", "small2", "small3"]


async def test_a_cancelled_call_leaves_at_once():
    async with fleet(1) as f:
        for name in ("running", "gone", "next"):
            await f.call(name, n=3)
        f.tasks["gone"].cancel()
        await settle()
        assert f.queue.sequences == 3
        await f.end("running")
        assert f.sent == ["running", "next"]


async def test_a_call_cancelled_as_its_turn_comes_frees_it():
    async with fleet(1) as f:
        for name in ("running", "gone", "next"):
            await f.call(name)
        f._ends["running"].set()
        await f.tasks["running"]  # the turn of "gone" has come, and it has not heard yet
        f.tasks["gone"].cancel()
        await settle()
        assert f.sent[-1] == "next"


async def test_callers_that_leave_leave_no_memory_behind():
    async with fleet(0) as f:
        await f.call("running")
        for i in range(3000):
            task = asyncio.create_task(f._run(f"gone{i}", 1, 0, "", 1))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len(f.queue._ready) < 10


@pytest.mark.parametrize(("bound", "name"), [({"max_sequences": 8}, "MAX_SEQUENCES"), ({"max_bytes": 8}, "MAX_BYTES")])
async def test_a_full_queue_refuses_and_names_its_bound(bound, name):
    async with fleet(1, **bound) as f:
        await f.call("running", n=100, nbytes=100)
        await f.call("waits", n=8, nbytes=8)
        await f.call("one too many")
        with pytest.raises(Overloaded, match=rf"holds 8 of at most 8 .*{name}") as refused:
            await f.tasks["one too many"]
        assert refused.value.detail == {"bound": name, "limit": 8, "held": 8, "asked": 1}
        await f.end("running")
        assert f.sent == ["running", "waits"]


async def test_a_call_that_was_sent_before_is_never_refused_by_the_queue():
    async with fleet(2, max_sequences=1) as f:
        await f.call("running")
        await f.call("refused", n=50, refuse="f")
        assert f.queue.sequences == 50 and not f.tasks["refused"].done()


async def test_one_call_goes_to_a_fleet_of_zero():
    async with fleet(0) as f:
        for name in "abc":
            await f.call(name)
        assert f.sent == ["a"]
        f.room = 2
        f.queue.fleet_changed(can_take_others=True)
        await settle()
        assert f.sent == ["a", "b"]


async def test_a_refused_call_keeps_its_place_and_waits_for_a_change():
    async with fleet(3) as f:
        await f.call("running", n=2)
        await f.call("refused", refuse="f")
        await f.call("later")
        assert f.sent == ["running", "refused"]
        await f.end("running")
        assert f.sent == ["running", "refused", "refused", "later"]


async def test_a_call_for_a_missing_version_holds_up_no_other():
    async with fleet(4) as f:
        await f.call("running")
        await f.call("early", refuse="v")
        await f.call("any")
        assert f.sent == ["running", "early", "any"]
        f.queue.fleet_changed(can_take_others=False)
        await settle()
        assert f.sent[-1] == "any"
        f.queue.fleet_changed(can_take_others=True)
        await settle()
        assert f.sent[-1] == "early"


async def test_calls_refused_less_often_come_first():
    async with fleet(9) as f:
        await f.call("running")
        await f.call("hopeless", refuse="v" * 50)
        await f.call("second", refuse="v")
        f.sent.clear()
        await f.call("ends")
        await f.end("ends")  # recalls one
        assert f.sent == ["ends", "hopeless"]
        await f.call("ends again")
        await f.end("ends again")
        assert f.sent[-1] == "second"


async def test_full_replicas_are_not_asked_by_all_that_wait():
    async with fleet(100) as f:
        await f.call("running", n=50)
        await f.call("refused", refuse="f" * 9)
        for i in range(40):
            await f.call(f"w{i}")
        assert f.sent == ["running", "refused"]
        [(after_s, _)] = f.timers
        assert after_s == RETRY_S
        await f.fire()
        assert f.sent[2:] == ["refused", *(f"w{i}" for i in range(RETRIED_CALLS - 1))]


async def test_calls_that_lack_memory_go_again_by_age_of_session():
    async with fleet(10) as f:
        await f.call("running")
        for name in ("old", "young"):
            await f.call(name, refuse="mm")
        await f.call("rollout", refuse="f")
        assert f.sent == ["running", "old", "young", "rollout"]
        await f.fire()
        assert f.sent[4:] == ["old", "young", "rollout"]  # once more refused, old is still before young
        await f.end("running")
        assert f.sent[7:] == ["old"]
        await f.fire()
        assert f.sent[8:] == ["young"]


async def test_turns_of_a_session_go_before_sessions_that_began_later():
    queue = DispatchQueue(lambda: 1)
    first, new = queue.ticket(0, "old"), queue.ticket(0, "new")
    again = queue.ticket(0, "old")
    assert first.arrival == again.arrival < new.arrival < queue.ticket(0).arrival


async def test_arrivals_of_sessions_are_bounded(monkeypatch):
    monkeypatch.setattr(queue_module, "MAX_SESSIONS", 2)
    queue = DispatchQueue(lambda: 1)
    first = queue.ticket(0, "a")
    for session in ("b", "a", "c"):
        queue.ticket(0, session)
    assert queue.ticket(0, "a").arrival == first.arrival
    assert len(queue._sessions) == 2
