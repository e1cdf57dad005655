"""Who reads a rollout along sees every token once, in order, and nothing is taken back."""

import asyncio

import pytest

from rollout_service.errors import EngineFailed
from rollout_service.fleet.continuation import StopSearch, joined
from rollout_service.fleet.live import LivePiece, LiveRollout
from rollout_service.fleet.progress import Record
from rollout_service.protocol.progress import Piece
from rollout_service.protocol.rollout import Completion, FinishReason, Rollout, Span
from rollout_service.protocol.sampling import GenerateCall, Sampling

CALL = GenerateCall(request_id="r", prompt_token_ids=(1, 2), sampling=Sampling())


def made(*tokens: int, index: int = 0, end: FinishReason = "abort") -> Completion:
    spans = (Span(version=3, start=0, end=len(tokens)),) if tokens else ()
    return Completion(index=index, token_ids=tokens, logprobs=(-1.0,) * len(tokens), finish_reason=end, spans=spans)


def tell(record: Record, completion: Completion) -> None:
    start = len(record.drafts[completion.index])
    record.add(Piece(call=record.number, start=start, made=completion))


def rollout(*completions: Completion) -> Rollout:
    return Rollout(request_id="r", prompt_token_ids=(1,), completions=completions, replica_id="a")


class Reading:
    """A reader, and the rollout that the test makes."""

    def __init__(self, sampling: Sampling) -> None:
        self.live = LiveRollout(sampling.n)
        self._lengths: dict[int, int] = {}
        self._answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self.making = asyncio.create_task(self._made())
        self.pieces = self.live.pieces(self.making)

    async def _made(self) -> Rollout:
        return await self._answer

    def _said(self, piece: LivePiece) -> tuple[int, tuple[int, ...], str]:
        made, index = piece.made, piece.made.index
        assert piece.start == self._lengths.get(index, 0) and piece.is_last == (made.finish_reason != "abort")
        self._lengths[index] = piece.start + len(made.token_ids)
        return index, made.token_ids, made.finish_reason

    async def next(self) -> tuple[int, tuple[int, ...], str]:
        return self._said(await anext(self.pieces))

    async def end(self, *completions: Completion) -> list[tuple[int, tuple[int, ...], str]]:
        self._answer.set_result(rollout(*completions))
        return [self._said(piece) async for piece in self.pieces]

    def fail(self) -> None:
        self._answer.set_exception(EngineFailed("lost"))


async def test_pieces_come_as_they_are_told_and_end_with_the_rollout() -> None:
    reading, record = Reading(Sampling(n=2)), Record(1, 2)
    reading.live.watch(record)
    tell(record, made(5, 6))
    assert await reading.next() == (0, (5, 6), "abort")
    tell(record, made(7, index=1))
    tell(record, made(8, index=1))
    tell(record, made(9, end="stop"))
    assert [await reading.next() for _ in range(2)] == [(0, (9,), "stop"), (1, (7, 8), "abort")]
    ends = await reading.end(made(5, 6, 9, end="stop"), made(7, 8, 4, index=1, end="length"))
    assert ends == [(1, (4,), "length")]


async def test_a_rollout_that_goes_on_elsewhere_is_read_on() -> None:
    reading, record, rest = Reading(Sampling()), Record(1, 1), Record(2, 1)
    reading.live.watch(record)
    tell(record, made(5))
    assert await reading.next() == (0, (5,), "abort")
    reading.live.watch_rest(made(5, 6, 7), rest)
    tell(rest, made(8))
    assert await reading.next() == (0, (6, 7), "abort")
    tell(rest, made(9))
    assert await reading.next() == (0, (8, 9), "abort")
    whole = joined(CALL, made(5, 6, 7), made(8, 9, end="length"))
    assert await reading.end(whole) == [(0, (), "length")]


async def test_after_a_seam_stop_strings_are_looked_for_before_anything_is_shown() -> None:
    asking = CALL.model_copy(update={"sampling": Sampling(stop=("ENDx",))})
    reading, record, rest = Reading(asking.sampling), Record(1, 1), Record(2, 1)
    reading.live.watch(record)
    tell(record, made(5))
    assert await reading.next() == (0, (5,), "abort")
    texts = {1: "?", 2: "?", 5: "a", 6: "E", 7: "ND", 8: "x", 9: "b"}
    search = StopSearch(asking, (5, 6), lambda tokens, _: "".join(texts[token] for token in tokens))
    reading.live.watch_rest(made(5, 6), rest, search)
    tell(rest, made(7))
    assert [await reading.next() for _ in range(2)] == [(0, (6,), "abort"), (0, (7,), "abort")]
    tell(rest, made(8, 9, 9, end="length"))
    tell(rest, made(9))
    assert await reading.end(made(5, 6, 7, 8, end="stop")) == [(0, (8,), "stop")]


async def test_an_end_at_a_stop_string_of_the_prompt_is_not_shown() -> None:
    asking = CALL.model_copy(
        update={"sampling": Sampling(stop=("END",)), "prompt_token_ids": tuple("END é".encode()[:-1])}
    )
    reading, record, rest = Reading(asking.sampling), Record(1, 1), Record(2, 1)
    reading.live.watch(record, lambda: StopSearch(asking, (), lambda tokens, _: bytes(tokens).decode(errors="replace")))
    tell(record, made("é".encode()[-1], end="stop").model_copy(update={"stop_reason": "END"}))
    reading.live.watch_rest(made("é".encode()[-1]), rest)
    tell(rest, made(8))
    assert [await reading.next() for _ in range(2)] == [(0, ("é".encode()[-1],), "abort"), (0, (8,), "abort")]


async def test_an_error_reaches_the_reader() -> None:
    reading = Reading(Sampling())
    reading.fail()
    with pytest.raises(EngineFailed):
        await reading.next()


async def test_a_reader_that_goes_away_ends_the_rollout() -> None:
    reading, record = Reading(Sampling()), Record(1, 1)
    reading.live.watch(record)
    tell(record, made(5))
    await reading.next()
    await reading.pieces.aclose()
    await asyncio.wait([reading.making])
    assert reading.making.cancelled()
