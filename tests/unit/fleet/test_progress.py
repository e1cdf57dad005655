"""Rollouts under way: what is kept of them, which replicas are polled, and what a streaming client gets."""

import asyncio

import pytest

from rollout_service.errors import DeploymentFailed, EngineFailed, NotReady, RolloutServiceError
from rollout_service.fleet.continuation import StopSearch, merge_completions
from rollout_service.fleet.progress import (
    RETRY_S,
    CallProgress,
    CompletionDelta,
    CompletionProgress,
    ProgressPoller,
    RolloutProgress,
)
from rollout_service.fleet.queue import Ticket
from rollout_service.protocol.progress import Piece, ProgressAsk, ProgressReply
from rollout_service.protocol.rollout import Candidate, Completion, FinishReason, Rollout
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.protocol.sampling_mask import pack, unpack
from rollout_service.runtime.placements import Placements
from tests.unit.fleet.completions import completion_of

CALL = GenerateCall(request_id="r", prompt_token_ids=(1, 2), sampling=Sampling())


def call_of(n: int = 1) -> CallProgress:
    rollout = RolloutProgress(n)
    return CallProgress(CALL, Ticket(0, 0), rollout, rollout.completions)


def made(*tokens: int, version: int = 3, index: int = 0, end: FinishReason = "abort") -> Completion:
    return completion_of(tokens, *[(version, len(tokens))] * bool(tokens), index=index, end=end)


class TestCompletionProgress:
    def test_pieces_become_one_completion(self):
        progress = CompletionProgress(0)
        progress.add(0, made(1, 2))
        progress.add(2, made(3))
        progress.add(3, made(4, version=4, end="stop").model_copy(update={"stop_reason": 4}))
        progress.replica_id = "a"
        whole = progress.reported()
        assert whole.token_ids == (1, 2, 3, 4) and whole.logprobs == pytest.approx((-0.1, -0.2, -0.3, -0.4))
        assert [(s.version, s.start, s.end, s.replica_id) for s in whole.spans] == [(3, 0, 3, "a"), (4, 3, 4, "a")]
        assert (whole.finish_reason, whole.stop_reason) == ("stop", 4)
        later = progress.reported(2)
        assert later.token_ids == (3, 4) and [(s.version, s.start, s.end) for s in later.spans] == [
            (3, 0, 1),
            (4, 1, 2),
        ]

    def test_of_a_piece_that_was_told_in_part_the_rest_is_taken(self):
        progress = CompletionProgress(0)
        for start in (0, 0, 3):  # told twice, and with a gap
            progress.add(start, made(1, 2))
        progress.add(1, made(2, 3, 4, version=4, end="stop"))
        progress.add(0, made(1, 2, 3, 4, 5))
        whole = progress.reported()
        assert whole.token_ids == (1, 2, 3, 4) and whole.finish_reason == "stop"
        assert [(s.version, s.start, s.end) for s in whole.spans] == [(3, 0, 2), (4, 2, 4)]

    def test_candidates_and_masks_come_along(self):
        progress = CompletionProgress(0)
        for start, token in enumerate((1, 2)):
            piece = made(token).model_copy(
                update={"top_logprobs": ((Candidate(token, -0.5, 1),),), "packed_sampling_mask": (pack([[token]]),)}
            )
            progress.add(start, piece)
        later = progress.reported(1)
        assert later.top_logprobs == ((Candidate(2, -0.5, 1),),)
        assert unpack(later.packed_sampling_mask or ())[1].tolist() == [2]


class Engine:
    """Answers what the test has written down, and then never."""

    def __init__(self, *answers: tuple[Piece, ...] | RolloutServiceError) -> None:
        self._answers = list(answers)
        self.asked: list[ProgressAsk] = []
        self.used_up = asyncio.Event()

    async def progress(self, ask: ProgressAsk) -> ProgressReply:
        self.asked.append(ask)
        if not self._answers:
            self.used_up.set()
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if isinstance(answer, RolloutServiceError):
            raise answer
        return ProgressReply(number=10 * len(self.asked), pieces=answer)


async def test_one_question_at_a_time_goes_to_each_replica_with_calls():
    engine, placements = Engine((Piece(call=1, start=0, made=made(1, 2)),), ()), Placements()
    poller = ProgressPoller(engine, "g", placements)
    first, second = call_of(), call_of(2)
    with poller.follow(first), poller.follow(second):
        placements.note("g", first.number, "a")
        placements.note("g", second.number, "a")
        placements.note("another", first.number, "b")
        await engine.used_up.wait()
        assert [(ask.replica_id, ask.origin, ask.acknowledged) for ask in engine.asked] == [
            ("a", "g", 0), ("a", "g", 10), ("a", "g", 20),
        ]  # fmt: skip
        assert [c.token_ids for c in first.reported()] == [(1, 2)] and second.is_empty
        assert {s.replica_id for c in first.reported() for s in c.spans} == {"a"}


async def test_what_comes_too_late_is_for_nobody():
    late = tuple(Piece(call=number, start=0, made=made(1)) for number in (1, 2))
    engine, placements = Engine(late), Placements()
    poller = ProgressPoller(engine, "g", placements)
    second, elsewhere = call_of(), call_of()
    with poller.follow(call_of()):
        pass
    with poller.follow(second), poller.follow(elsewhere):
        placements.note("g", second.number, "a")
        placements.note("g", elsewhere.number, "b")
        await engine.used_up.wait()
        assert not second.is_empty and elsewhere.is_empty


async def test_nobody_is_asked_when_all_calls_are_answered():
    engine, placements = Engine((), ()), Placements()
    poller = ProgressPoller(engine, "g", placements)
    record = call_of()
    with poller.follow(record):
        placements.note("g", record.number, "a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.asked == [] and poller._polling == {}


@pytest.mark.parametrize("error", [NotReady("removed"), DeploymentFailed("a bug")])
async def test_a_question_that_fails_is_asked_again_later(error):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    engine, placements = Engine((), error, (Piece(call=1, start=0, made=made(7)),)), Placements()
    poller = ProgressPoller(engine, "g", placements, sleep)
    record = call_of()
    with poller.follow(record):
        placements.note("g", record.number, "a")
        await engine.used_up.wait()
        assert slept == [RETRY_S] and [c.token_ids for c in record.reported()] == [(7,)]
        assert [ask.acknowledged for ask in engine.asked] == [0, 10, 10, 30]


async def test_replicas_are_told_their_part_of_the_queue():
    engine, placements = Engine(), Placements()
    poller = ProgressPoller(engine, "g", placements, queued=lambda: 7)
    first, second = call_of(), call_of()
    with poller.follow(first), poller.follow(second):
        placements.note("g", first.number, "a")
        placements.note("g", second.number, "b")
        while len(engine.asked) < 2:
            await asyncio.sleep(0)
        assert [ask.queued for ask in engine.asked] == [4, 4]


def tell(call: CallProgress, completion: Completion) -> None:
    start = len(call.completions[completion.index])
    call.add(Piece(call=call.number, start=start, made=completion))


def rollout(*completions: Completion) -> Rollout:
    return Rollout(request_id="r", prompt_token_ids=(1,), completions=completions, replica_id="a")


class Reading:
    """A reader, and the rollout that the test makes."""

    def __init__(self, sampling: Sampling) -> None:
        self.progress = RolloutProgress(sampling.n)
        self.call = CallProgress(CALL, Ticket(0, 0), self.progress, self.progress.completions)
        self._lengths: dict[int, int] = {}
        self._answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self.making = asyncio.create_task(self._made())
        self.pieces = self.progress.stream(self.making)

    async def _made(self) -> Rollout:
        return await self._answer

    def _said(self, piece: CompletionDelta) -> tuple[int, tuple[int, ...], str]:
        made, index = piece.made, piece.made.index
        assert piece.start == self._lengths.get(index, 0) and piece.is_last == (made.finish_reason != "abort")
        self._lengths[index] = piece.start + len(made.token_ids)
        return index, made.token_ids, made.finish_reason

    async def next(self) -> tuple[int, tuple[int, ...], str]:
        return self._said(await anext(self.pieces))

    async def end(self, *completions: Completion) -> list[tuple[int, tuple[int, ...], str]]:
        self._answer.set_result(rollout(*completions))
        return [self._said(piece) async for piece in self.pieces]

    def continue_(self, base: Completion | None, search: StopSearch | None = None) -> None:
        """Begin a generation that continues ``base``."""
        self.progress.completions[0].begin(base, search)

    def fail(self) -> None:
        self._answer.set_exception(EngineFailed("lost"))


async def test_pieces_come_as_they_are_told_and_end_with_the_rollout():
    reading = Reading(Sampling(n=2))
    tell(reading.call, made(5, 6))
    assert await reading.next() == (0, (5, 6), "abort")
    tell(reading.call, made(7, index=1))
    tell(reading.call, made(8, index=1))
    tell(reading.call, made(9, end="stop"))
    assert [await reading.next() for _ in range(2)] == [(0, (9,), "stop"), (1, (7, 8), "abort")]
    ends = await reading.end(made(5, 6, 9, end="stop"), made(7, 8, 4, index=1, end="length"))
    assert ends == [(1, (4,), "length")]


async def test_a_rollout_that_goes_on_elsewhere_is_read_on():
    reading = Reading(Sampling())
    tell(reading.call, made(5))
    assert await reading.next() == (0, (5,), "abort")
    reading.continue_(made(5, 6, 7))
    tell(reading.call, made(8))
    assert await reading.next() == (0, (6, 7), "abort")
    tell(reading.call, made(9))
    assert await reading.next() == (0, (8, 9), "abort")
    whole = merge_completions(CALL, made(5, 6, 7), made(8, 9, end="length"))
    assert await reading.end(whole) == [(0, (), "length")]


async def test_after_a_seam_stop_strings_are_looked_for_before_anything_is_shown():
    asking = CALL.model_copy(update={"sampling": Sampling(stop=("ENDx",))})
    reading = Reading(asking.sampling)
    tell(reading.call, made(5))
    assert await reading.next() == (0, (5,), "abort")
    texts = {1: "?", 2: "?", 5: "a", 6: "E", 7: "ND", 8: "x", 9: "b"}
    search = StopSearch(asking, (5, 6), lambda tokens, _: "".join(texts[token] for token in tokens))
    reading.continue_(made(5, 6), search)
    tell(reading.call, made(7))
    assert [await reading.next() for _ in range(2)] == [(0, (6,), "abort"), (0, (7,), "abort")]
    tell(reading.call, made(8, 9, 9, end="length"))
    tell(reading.call, made(9))
    assert await reading.end(made(5, 6, 7, 8, end="stop")) == [(0, (8,), "stop")]


async def test_an_end_at_a_stop_string_of_the_prompt_is_not_shown():
    asking = CALL.model_copy(
        update={"sampling": Sampling(stop=("END",)), "prompt_token_ids": tuple("END é".encode()[:-1])}
    )
    reading = Reading(asking.sampling)
    reading.continue_(None, StopSearch(asking, (), lambda tokens, _: bytes(tokens).decode(errors="replace")))
    tell(reading.call, made("é".encode()[-1], end="stop").model_copy(update={"stop_reason": "END"}))
    reading.continue_(made("é".encode()[-1]))
    tell(reading.call, made(8))
    assert [await reading.next() for _ in range(2)] == [(0, ("é".encode()[-1],), "abort"), (0, (8,), "abort")]


async def test_an_error_reaches_the_reader():
    reading = Reading(Sampling())
    reading.fail()
    with pytest.raises(EngineFailed):
        await reading.next()


async def test_a_reader_that_goes_away_ends_the_rollout():
    reading = Reading(Sampling())
    tell(reading.call, made(5))
    await reading.next()
    await reading.pieces.aclose()
    await asyncio.wait([reading.making])
    assert reading.making.cancelled()
