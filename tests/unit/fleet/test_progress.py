"""What a gateway keeps of the calls that run, and whom it asks for it."""

import asyncio

import pytest

from rollout_service.errors import DeploymentFailed, NotReady, RolloutServiceError
from rollout_service.fleet.placements import Placements
from rollout_service.fleet.progress import RETRY_S, Draft, Follower
from rollout_service.protocol.progress import Piece, ProgressAsk, ProgressReply
from rollout_service.protocol.rollout import Candidate, Completion, FinishReason, Span
from rollout_service.protocol.sampling_mask import pack, unpack


def made(*tokens: int, version: int = 3, index: int = 0, end: FinishReason = "abort") -> Completion:
    spans = (Span(version=version, start=0, end=len(tokens)),) if tokens else ()
    logprobs = tuple(-0.1 * token for token in tokens)
    return Completion(index=index, token_ids=tokens, logprobs=logprobs, finish_reason=end, spans=spans)


class TestDraft:
    def test_pieces_become_one_completion(self) -> None:
        draft = Draft(0)
        draft.add(0, made(1, 2))
        draft.add(2, made(3))
        draft.add(3, made(4, version=4, end="stop").model_copy(update={"stop_reason": 4}))
        whole = draft.since(0, "a")
        assert whole.token_ids == (1, 2, 3, 4) and whole.logprobs == pytest.approx((-0.1, -0.2, -0.3, -0.4))
        assert [(s.version, s.start, s.end, s.replica_id) for s in whole.spans] == [(3, 0, 3, "a"), (4, 3, 4, "a")]
        assert (whole.finish_reason, whole.stop_reason) == ("stop", 4)
        later = draft.since(2, "a")
        assert later.token_ids == (3, 4) and [(s.version, s.start, s.end) for s in later.spans] == [
            (3, 0, 1),
            (4, 1, 2),
        ]

    def test_what_was_told_before_is_not_taken_again(self) -> None:
        draft = Draft(0)
        for start in (0, 0, 3):
            draft.add(start, made(1, 2))
        assert draft.since(0, None).token_ids == (1, 2)

    def test_of_a_piece_that_was_told_in_part_the_rest_is_taken(self) -> None:
        draft = Draft(0)
        draft.add(0, made(1, 2))
        draft.add(1, made(2, 3, 4, version=4, end="stop"))
        draft.add(0, made(1, 2, 3, 4, 5))
        whole = draft.since(0, None)
        assert whole.token_ids == (1, 2, 3, 4) and whole.finish_reason == "stop"
        assert [(s.version, s.start, s.end) for s in whole.spans] == [(3, 0, 2), (4, 2, 4)]

    def test_candidates_and_masks_come_along(self) -> None:
        draft = Draft(0)
        for start, token in enumerate((1, 2)):
            piece = made(token).model_copy(
                update={"top_logprobs": ((Candidate(token, -0.5, 1),),), "packed_sampling_mask": (pack([[token]]),)}
            )
            draft.add(start, piece)
        later = draft.since(1, None)
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


async def test_one_question_at_a_time_goes_to_each_replica_with_calls() -> None:
    engine, placements = Engine((Piece(call=1, start=0, made=made(1, 2)),), ()), Placements()
    follower = Follower(engine, "g", placements)  # type: ignore[arg-type]
    with follower.follow(1) as first, follower.follow(2) as second:
        placements.note("g", first.number, "a")
        placements.note("g", second.number, "a")
        placements.note("another", first.number, "b")
        await engine.used_up.wait()
        assert [(ask.replica_id, ask.origin, ask.acknowledged) for ask in engine.asked] == [
            ("a", "g", 0), ("a", "g", 10), ("a", "g", 20),
        ]  # fmt: skip
        assert [c.token_ids for c in first.completions()] == [(1, 2)] and second.is_empty
        assert {s.replica_id for c in first.completions() for s in c.spans} == {"a"}


async def test_what_comes_too_late_is_for_nobody() -> None:
    late = tuple(Piece(call=number, start=0, made=made(1)) for number in (1, 2))
    engine, placements = Engine(late), Placements()
    follower = Follower(engine, "g", placements)  # type: ignore[arg-type]
    with follower.follow(1):
        pass
    with follower.follow(1) as second, follower.follow(1) as elsewhere:
        placements.note("g", second.number, "a")
        placements.note("g", elsewhere.number, "b")
        await engine.used_up.wait()
        assert not second.is_empty and elsewhere.is_empty


async def test_what_comes_before_the_placement_is_kept_for_it() -> None:
    early = tuple(Piece(call=number, start=0, made=made(number)) for number in (2, 3))
    engine, placements = Engine(early, (Piece(call=2, start=1, made=made(8)),)), Placements()
    follower = Follower(engine, "g", placements)  # type: ignore[arg-type]
    with follower.follow(1) as first, follower.follow(1) as second, follower.follow(1) as elsewhere:
        placements.note("g", first.number, "a")
        await engine.used_up.wait()
        placements.note("g", second.number, "a")
        placements.note("g", elsewhere.number, "b")
        await asyncio.sleep(0)
        assert [c.token_ids for c in second.completions()] == [(2, 8)] and elsewhere.is_empty


async def test_nobody_is_asked_when_all_calls_are_answered() -> None:
    engine, placements = Engine((), ()), Placements()
    follower = Follower(engine, "g", placements)  # type: ignore[arg-type]
    with follower.follow(1) as record:
        placements.note("g", record.number, "a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.asked == [] and follower._asking == {}


@pytest.mark.parametrize("error", [NotReady("removed"), DeploymentFailed("a bug")])
async def test_a_question_that_fails_is_asked_again_later(error: RolloutServiceError) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    engine, placements = Engine((), error, (Piece(call=1, start=0, made=made(7)),)), Placements()
    follower = Follower(engine, "g", placements, sleep)  # type: ignore[arg-type]
    with follower.follow(1) as record:
        placements.note("g", record.number, "a")
        await engine.used_up.wait()
        assert slept == [RETRY_S] and [c.token_ids for c in record.completions()] == [(7,)]
        assert [ask.acknowledged for ask in engine.asked] == [0, 10, 10, 30]


async def test_replicas_are_told_their_part_of_the_queue() -> None:
    engine, placements = Engine(), Placements()
    follower = Follower(engine, "g", placements, queued=lambda: 7)  # type: ignore[arg-type]
    with follower.follow(1) as first, follower.follow(1) as second:
        placements.note("g", first.number, "a")
        placements.note("g", second.number, "b")
        while len(engine.asked) < 2:
            await asyncio.sleep(0)
        assert [ask.queued for ask in engine.asked] == [4, 4]
