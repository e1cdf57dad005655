"""Progress of rollouts under way, for streaming clients and for the loss of a replica.

One poll at a time goes to each replica that has calls of this gateway (``protocol/progress.py``). Reported tokens are
kept until the call is answered: 12 bytes a token, at most ``max_tokens``, plus requested extras. Nothing is queued for
a streaming client: a slow one gets more tokens at once.
"""

import asyncio
import itertools
import logging
from array import array
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rollout_service.errors import NotReady, RolloutServiceError
from rollout_service.fleet.continuation import StopSearch, slice_completion
from rollout_service.fleet.queue import Ticket
from rollout_service.protocol.progress import Piece, ProgressAsk
from rollout_service.protocol.rollout import Candidate, Completion, FinishReason, Rollout, Span, merge_spans
from rollout_service.protocol.sampling import GenerateCall
from rollout_service.runtime.placements import PLACEMENTS, Placements
from rollout_service.runtime.rpc import EngineCalls

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Time in seconds before a failed poll is repeated."""


class CompletionDelta(NamedTuple):
    """New tokens of one completion, for a streaming client."""

    made: Completion
    """These tokens alone; spans count from the first of them. ``finish_reason`` is "abort" until the last delta."""
    start: int
    """Number of tokens before these."""
    is_last: bool
    """True for the completion's last delta. It may be without tokens; its ``finish_reason`` is "abort" if the
    completion was aborted for good."""


class CompletionProgress:
    """One completion under way: the tokens that polls reported, and the number of those that a client has got."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._sent, self._has_ended = 0, False
        self.begin()

    def begin(self, base: Completion | None = None, search: StopSearch | None = None) -> None:
        """Begin a generation, which has reported no token yet.

        Args:
            base: The completion that the generation continues.
            search: Search for stop strings that the generation's engine misses, or finds in its prompt.
        """
        self.replica_id: str | None = None
        """The replica that runs the generation; None: none so far."""
        self._base, self._search = base, search
        self._searched = 0
        self._end: int | None = None
        """Number of tokens up to the one that completes a stop string; None: not found yet."""
        self._finish_reason: FinishReason = "abort"
        """"abort" until the generation has ended."""
        self._stop_reason: int | str | None = None
        self._token_ids, self._logprobs = array("i"), array("d")
        self._spans: list[Span] = []
        self._top_logprobs: list[tuple[Candidate, ...]] | None = None
        self._masks: list[str] | None = None
        self._mask_starts: list[int] = []

    def __len__(self) -> int:
        """Return the number of tokens that the running generation has reported."""
        return len(self._token_ids)

    def add(self, start: int, made: Completion) -> None:
        """Append reported tokens. Tokens that were already added are skipped, as after a late reply to a poll."""
        known, has_ended = len(self) - start, self._finish_reason != "abort"
        if has_ended or not 0 <= known <= len(made.token_ids):
            return
        if known:
            start, made = len(self), slice_completion(made, known, len(made.token_ids))
        self._token_ids.extend(made.token_ids)
        self._logprobs.extend(made.logprobs)
        self._spans[-1:] = merge_spans((*self._spans[-1:], *(span.shift(start) for span in made.spans)))
        if made.top_logprobs is not None:
            self._top_logprobs = self._top_logprobs or []
            self._top_logprobs += made.top_logprobs
        if made.packed_sampling_mask is not None:
            self._masks = self._masks or []
            self._masks += made.packed_sampling_mask
            self._mask_starts += [start] * len(made.packed_sampling_mask)
        self._finish_reason, self._stop_reason = made.finish_reason, made.stop_reason

    def reported(self, start: int = 0) -> Completion:
        """Return the reported tokens after ``start``, which must be the end of a piece; spans count from there and name
        the replica."""
        return Completion(
            index=self.index,
            token_ids=tuple(self._token_ids[start:]),
            logprobs=tuple(self._logprobs[start:]),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            spans=tuple(
                span.model_copy(
                    update={"start": max(0, span.start - start), "end": span.end - start, "replica_id": self.replica_id}
                )
                for span in self._spans
                if span.end > start
            ),
            top_logprobs=None if self._top_logprobs is None else tuple(self._top_logprobs[start:]),
            packed_sampling_mask=None
            if self._masks is None
            else tuple(self._masks[bisect_left(self._mask_starts, start) :]),
        )

    def take(self) -> CompletionDelta | None:
        """Return the tokens that the client has not got yet; None if there are none."""
        if self._has_ended:
            return None
        made, start = self._unsent(), self._sent
        self._has_ended = made.finish_reason != "abort"
        self._sent += len(made.token_ids)
        return CompletionDelta(made, start, self._has_ended) if made.token_ids or self._has_ended else None

    def take_rest(self, whole: Completion) -> CompletionDelta | None:
        """Return the last tokens of the finished completion; None if the client has got them."""
        if self._has_ended:
            return None
        return CompletionDelta(slice_completion(whole, self._sent, len(whole.token_ids)), self._sent, is_last=True)

    def _unsent(self) -> Completion:
        base = 0 if self._base is None else len(self._base.token_ids)
        if self._base is not None and self._sent < base:
            return slice_completion(self._base, self._sent, base)
        so_far = self._sent - base
        made = self.reported(so_far)
        if self._search is None:
            return made
        if self._end is None:
            new = made.token_ids[self._searched - so_far :]
            found = self._search.end_in(new)
            self._searched += len(new)
            if found is not None:
                self._end = found[0]
            elif self._search.refutes(made, -so_far):
                self._end = self._searched
        if self._end is None:
            return made
        # the last delta, with the finish reason and the stop token, comes with the rollout
        up_to = slice_completion(made, 0, max(0, self._end - 1 - so_far))
        return up_to.model_copy(update={"finish_reason": "abort", "stop_reason": None})


@dataclass
class CallProgress:
    """One call: its place in the queue, its attempts, and the replica that runs it."""

    asked: GenerateCall
    """The call for the whole rollout; a continuation sends a part of it."""
    ticket: Ticket
    rollout: "RolloutProgress"
    completions: tuple[CompletionProgress, ...]
    """The completions that the call generates: all of its rollout, or one that was interrupted."""
    attempts: int = 1
    lost_on: tuple[str, ...] = ()
    cut_short_by: Literal["abort", "lost"] = "abort"
    base: Completion | None = None
    """The interrupted completion that the call continues; None: the call is the rollout's first."""
    not_sent: int = 0
    """Number of times in a row that Serve could not send the call to any replica."""
    number: int = 0
    """Number of the call in this gateway, another one each time that it is sent."""
    replica_id: str | None = None
    """The replica that took the call; None: none so far."""

    def add(self, piece: Piece) -> None:
        """Append a piece that the replica reported."""
        self.completions[piece.made.index].add(piece.start, piece.made)
        self.rollout.arrived.set()

    @property
    def is_empty(self) -> bool:
        """Return True if no token has arrived."""
        return not any(len(completion) for completion in self.completions)

    def reported(self) -> tuple[Completion, ...]:
        """Return all completions so far; ``finish_reason`` is "abort" for those that have not ended."""
        return tuple(each.reported() for each in self.completions)

    def lose(self, replica_id: object) -> None:
        """Note that the call's replica is lost."""
        self.cut_short_by = "lost"
        self.lost_on += (replica_id,) if isinstance(replica_id, str) else ()


class RolloutProgress:
    """The completions of one rollout under way.

    Tokens that were sent to a client are never withdrawn. A completion that would restart after an interruption is
    therefore sent when it has ended. Tokens of a continuation are sent after the search for stop strings.
    """

    def __init__(self, num_completions: int) -> None:
        self.completions = tuple(CompletionProgress(index) for index in range(num_completions))
        self.arrived = asyncio.Event()
        """Set whenever tokens arrive."""
        self.is_streamed = True
        """False if tokens are sent when all completions have ended."""

    async def stream(self, making: asyncio.Task[Rollout]) -> AsyncGenerator[CompletionDelta]:
        """Yield new tokens until ``making`` has all completions; raises its errors.

        Closing this generator, or cancelling its consumer, cancels ``making``.
        """
        making.add_done_callback(lambda _: self.arrived.set())
        try:
            while not making.done():
                await self.arrived.wait()
                self.arrived.clear()
                while not making.done() and (new := self._take()):
                    for delta in new:
                        yield delta
            for whole in making.result().completions:
                if (last := self.completions[whole.index].take_rest(whole)) is not None:
                    yield last
        finally:
            making.cancel()

    def _take(self) -> list[CompletionDelta]:
        if not self.is_streamed:
            return []
        return [delta for completion in self.completions if (delta := completion.take()) is not None]


class ProgressPoller:
    """Polls the replicas that run calls of one gateway."""

    def __init__(
        self,
        engine: EngineCalls,
        origin: str,
        placements: Placements = PLACEMENTS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        queued: Callable[[], int] = lambda: 0,
    ) -> None:
        """``origin``: the gateway. ``sleep``: in seconds. ``queued``: returns the number of sequences in its queue."""
        self._engine, self._origin, self._placements, self._sleep = engine, origin, placements, sleep
        self._queued = queued
        self._numbers = itertools.count(1)
        self._calls: dict[int, CallProgress] = {}
        self._polling: dict[str, asyncio.Task[None]] = {}

    @contextmanager
    def follow(self, call: CallProgress) -> Iterator[None]:
        """Poll for a call that is sent within this context, under a new ``number``."""
        if not self._calls:
            self._placements.listen(self._origin, self._place)
        number = next(self._numbers)
        call.number, call.replica_id = number, None
        self._calls[number] = call
        try:
            yield
        finally:
            del self._calls[number]
            if not self._calls:
                self._placements.forget(self._origin)

    def _place(self, number: int, replica_id: str) -> None:
        call = self._calls.get(number)
        if call is None:  # already answered, or refused
            return
        call.replica_id = replica_id
        for completion in call.completions:
            completion.replica_id = replica_id
        if replica_id not in self._polling:
            self._polling[replica_id] = asyncio.create_task(
                self._poll(replica_id),
                name=f"progress of {replica_id}",
                context=Context(),  # an empty context, not that of the first request with its trace
            )

    async def _poll(self, replica_id: str) -> None:
        """Poll a replica while it has calls."""
        acknowledged = 0
        try:
            while any(call.replica_id == replica_id for call in self._calls.values()):
                ask = ProgressAsk(
                    replica_id=replica_id,
                    origin=self._origin,
                    acknowledged=acknowledged,
                    # divided among replicas, so that the autoscaler, which adds up, counts the queue once
                    queued=-(-self._queued() // len(self._polling)),
                )
                try:
                    reply = await self._engine.progress(ask)
                except RolloutServiceError as error:
                    level = logging.DEBUG if isinstance(error, NotReady) else logging.WARNING
                    logger.log(level, "%s does not report its progress: %s", replica_id, error)
                    await self._sleep(RETRY_S)
                    continue
                acknowledged = reply.number
                for piece in reply.pieces:
                    call = self._calls.get(piece.call)
                    if call is not None and call.replica_id == replica_id:
                        call.add(piece)
        finally:
            del self._polling[replica_id]
