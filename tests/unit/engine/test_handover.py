"""What runs in a replica that is to end: it ends by itself while others serve, or goes on elsewhere."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from rollout_service.engine.admission import AdmissionLimit
from rollout_service.engine.handover import UNASKED_AFTER_S, HandOver
from rollout_service.runtime.drain import Drain

TIMEOUT_S, WORK_S = 30.0, 20.0
POLLS = 1000


class Replica:
    """One with sequences, in a time of its own: it passes only when somebody sleeps."""

    def __init__(self, *, others: bool) -> None:
        self.now, self.others, self.controller_answers = 0.0, others, True
        self.aborted_at: list[float] = []
        self.at: dict[float, Callable[[], None]] = {}
        """What happens in the first sleep that ends after this time."""
        self.aborts_take_effect = True
        self.admission = AdmissionLimit(100)
        self._held = ExitStack()
        self.drain = Drain(TIMEOUT_S, lambda: self.now)
        self.hand_over = HandOver(
            self.drain, self.admission, self._others_serve, lambda: self.now, self._sleep, self._controller_answered
        )
        self.drain.serves(lambda: self.hand_over.hand_over(self))

    def take(self, sequences: int) -> None:
        self._held.enter_context(self.admission.admit(sequences))

    def finish(self) -> None:
        self._held.close()

    async def abort(self) -> None:
        self.aborted_at.append(round(self.now, 1))
        if self.aborts_take_effect:
            self.finish()

    async def drained(self) -> None:
        self.drain.begin()
        for _ in range(POLLS):
            await asyncio.sleep(0)
        assert self.drain.done

    async def _others_serve(self) -> bool:
        return self.others

    async def _controller_answered(self, within_s: float) -> bool:
        return self.controller_answers

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [time for time in self.at if time <= self.now]:
            self.at.pop(due)()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("others", "finished_at", "lost_at", "aborted_at"),
    [
        (True, 12.0, None, []),  # what runs ends by itself while others serve
        (True, None, None, [WORK_S]),  # what still runs when the time is up goes on elsewhere
        (False, None, None, [0]),
        (True, None, 5.0, [5.0]),
    ],
)
async def test_what_runs_ends_while_others_serve_and_is_given_back_else(others, finished_at, lost_at, aborted_at):
    replica = Replica(others=others)
    replica.take(3)
    if finished_at is not None:
        replica.at[finished_at] = replica.finish
    if lost_at is not None:
        replica.at[lost_at] = lambda: setattr(replica, "others", False)
    await replica.drained()
    assert replica.aborted_at == aborted_at and (finished_at is None or 12 <= replica.now < 13)


async def test_a_call_just_entering_the_engine_is_given_back_too():
    replica = Replica(others=False)
    replica.take(1)
    replica.aborts_take_effect = False
    replica.at[1.0] = lambda: setattr(replica, "aborts_take_effect", True)
    await replica.drained()
    assert len(replica.aborted_at) > 2 and replica.admission.running == 0


async def test_an_idle_replica_has_nothing_to_wait_for():
    replica = Replica(others=True)
    await replica.drained()
    assert (replica.now, replica.aborted_at) == (0, [])


async def test_a_replica_drains_when_told_to_or_when_nobody_calls_it():
    replica = Replica(others=True)
    replica.now = 1000.0
    assert not replica.hand_over.draining  # Serve does not ask a replica that starts
    replica.hand_over.asked()
    replica.now += UNASKED_AFTER_S
    assert not replica.hand_over.draining
    replica.now += 0.1
    assert replica.hand_over.draining
    replica.hand_over.asked()
    assert not replica.hand_over.draining
    replica.drain.begin()
    assert replica.hand_over.draining


@pytest.mark.parametrize("asked_again", [False, True])
async def test_what_runs_is_given_back_in_time_when_serve_stops_asking(asked_again):
    replica = Replica(others=True)
    replica.take(3)
    replica.hand_over.asked()
    if asked_again:
        replica.at[15.0] = replica.hand_over.asked
    watching = asyncio.create_task(replica.hand_over.watch(replica))
    while replica.now < 30:
        await asyncio.sleep(0)
    watching.cancel()
    assert [20 < at <= 22 for at in replica.aborted_at] == ([] if asked_again else [True])


async def test_without_a_controller_nobody_drains_and_nothing_is_given_back():
    replica = Replica(others=True)
    replica.take(3)
    replica.hand_over.asked()
    replica.controller_answers = False
    watching, drained_at = asyncio.create_task(replica.hand_over.watch(replica)), list[float]()
    replica.at[60.0] = lambda: setattr(replica, "controller_answers", True)
    while replica.now < 90:
        await asyncio.sleep(0)
        if replica.hand_over.draining:
            drained_at.append(replica.now)
    watching.cancel()
    assert min(drained_at) == 60 - 1 + UNASKED_AFTER_S and len(replica.aborted_at) == 1 and replica.aborted_at[0] > 70
