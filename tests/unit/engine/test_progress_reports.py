"""A replica tells each gateway what its calls have made: every token once, also when an answer is lost."""

import asyncio
from collections.abc import Sequence

import pytest

from rollout_service.engine.progress_reports import LIVE_PERIOD_S, MAX_TOKENS, PERIOD_S, QUIET_PERIODS, ProgressReports
from rollout_service.protocol.progress import Piece, ProgressAsk
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import GenerateCall, Sampling
from tests.unit.fleet.completions import completion_of


class Engine:
    """Has made the tokens 0, 1, 2 … of each completion; how many, the test says."""

    def __init__(self) -> None:
        self.made: dict[str, list[int]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.slept: list[float] = []

    def read(self, engine_id: str, since: Sequence[int], candidates: int) -> list[Completion]:
        found = []
        for index, made in enumerate(self.made.get(engine_id, ())):
            ended = (engine_id, index) in self.ended
            if made > since[index] or ended:
                end = "stop" if ended else "abort"
                found.append(completion_of(range(since[index], made), index=index, end=end))
        return found

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def progress(engine: Engine) -> ProgressReports:
    return ProgressReports(engine.read, engine.sleep)


def call(number: int, origin: str = "g", n: int = 1, name: str = "r", live: bool = False) -> GenerateCall:
    sampling = Sampling(n=n)
    return GenerateCall(
        request_id=name, prompt_token_ids=(5,), sampling=sampling, origin=origin, number=number, live=live
    )


def ask(acknowledged: int = 0, origin: str = "g") -> ProgressAsk:
    return ProgressAsk(replica_id="r1", origin=origin, acknowledged=acknowledged)


def shown(pieces: Sequence[Piece]) -> list[tuple[int, int, int, tuple[int, ...]]]:
    return [(p.call, p.made.index, p.start, p.made.token_ids) for p in pieces]


async def test_every_token_and_end_is_told_once_also_when_an_answer_is_lost(engine, progress):
    with progress.follow(call(1, n=2)) as name:
        engine.made[name] = [2, 1]
        first = await progress.report(ask())
        assert shown(first.pieces) == [(1, 0, 0, (0, 1)), (1, 1, 0, (0,))]
        engine.made[name] = [2, 3]
        lost = await progress.report(ask(first.number))
        assert shown(lost.pieces) == [(1, 1, 1, (1, 2))]
        engine.made[name] = [2, 4]
        second = await progress.report(ask(first.number))
        assert shown(second.pieces) == [(1, 1, 1, (1, 2, 3))]
        engine.ended.add((name, 0))
        third = await progress.report(ask(second.number))
        assert [(p.made.index, p.made.finish_reason, p.made.token_ids) for p in third.pieces] == [(0, "stop", ())]
        engine.made[name] = [2, 5]
        assert shown((await progress.report(ask(third.number))).pieces) == [(1, 1, 4, (4,))]


async def test_gateways_hear_of_their_own_calls_which_have_names_of_their_own_in_the_engine(engine, progress):
    with (
        progress.follow(call(1)) as first,
        progress.follow(call(2)) as second,
        progress.follow(call(0)) as third,
        progress.follow(call(1, "h", name="s")) as other,
    ):
        assert first == "r" and len({first, second, third, other}) == 4
        engine.made = {first: [1], second: [2], third: [3], other: [4]}
        assert shown((await progress.report(ask(origin="h"))).pieces) == [(1, 0, 0, (0, 1, 2, 3))]
        assert shown((await progress.report(ask(origin="g"))).pieces) == [(1, 0, 0, (0,)), (2, 0, 0, (0, 1))]
    assert (await progress.report(ask())).pieces == ()
    with progress.follow(call(3)) as again:
        assert again == "r"


async def test_an_answer_waits_for_something_but_not_for_long(engine, progress):
    with progress.follow(call(1)):
        assert (await progress.report(ask())).pieces == ()
    assert engine.slept == [PERIOD_S] * QUIET_PERIODS
    with progress.follow(call(2)), progress.follow(call(3, name="s", live=True)) as name:
        engine.made[name] = [1]
        await progress.report(ask())
    assert engine.slept[QUIET_PERIODS:] == [LIVE_PERIOD_S]


async def test_calls_without_a_reader_are_read_more_rarely(engine, progress):
    with progress.follow(call(1)) as one, progress.follow(call(2, name="s", live=True)) as other:
        told, acknowledged = [], 0
        for made in range(1, 9):
            engine.made = {one: [made], other: [made]}
            reply = await progress.report(ask(acknowledged))
            acknowledged = reply.number
            told.append({piece.call: len(piece.made.token_ids) for piece in reply.pieces})
    assert told == [*[{2: 1}] * 3, {1: 4, 2: 1}, *[{2: 1}] * 3, {1: 4, 2: 1}]
    assert set(engine.slept) == {LIVE_PERIOD_S}


async def test_an_answer_has_a_largest_size(engine, progress):
    with progress.follow(call(1)) as one, progress.follow(call(2)) as other:
        engine.made = {one: [MAX_TOKENS], other: [3]}
        first = await progress.report(ask())
        assert [piece.call for piece in first.pieces] == [1]
        assert shown((await progress.report(ask(first.number))).pieces) == [(2, 0, 0, (0, 1, 2))]


async def test_a_question_that_is_given_up_loses_nothing(engine, progress):
    held = ProgressReports(engine.read, lambda _: asyncio.Event().wait())
    with held.follow(call(1)) as name:
        engine.made[name] = [2]
        asking = asyncio.create_task(held.report(ask()))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        held._sleep = engine.sleep
        assert shown((await held.report(ask())).pieces) == [(1, 0, 0, (0, 1))]
