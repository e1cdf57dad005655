"""Progress of a gateway's calls, from which they continue if their replica is lost.

One poll at a time goes to each replica that has calls of this gateway (``protocol/progress.py``). Reported tokens are
kept until the call is answered: 12 bytes a token, at most ``max_tokens``, plus requested extras.
"""

import asyncio
import itertools
import logging
from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context

from rollout_service.errors import NotReady, RolloutServiceError
from rollout_service.fleet.continuation import part
from rollout_service.fleet.placements import PLACEMENTS, Placements
from rollout_service.protocol.progress import Piece, ProgressAsk
from rollout_service.protocol.rollout import Candidate, Completion, FinishReason, Span, merged
from rollout_service.runtime.rpc import EngineCalls

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Time in seconds before a failed poll is repeated."""


class Draft:
    """One completion of one generation, as far as it was reported."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish_reason: FinishReason = "abort"
        """"abort" until the completion has ended."""
        self.stop_reason: int | str | None = None
        self._token_ids, self._logprobs = array("i"), array("d")
        self._spans: list[Span] = []
        self._top_logprobs: list[tuple[Candidate, ...]] | None = None
        self._masks: list[str] | None = None
        self._mask_starts: list[int] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, start: int, made: Completion) -> None:
        """Append tokens. Tokens that were already added are skipped, as after a late reply to a poll."""
        told, ended = len(self) - start, self.finish_reason != "abort"
        if ended or not 0 <= told <= len(made.token_ids):
            return
        if told:
            start, made = len(self), part(made, told, len(made.token_ids))
        self._token_ids.extend(made.token_ids)
        self._logprobs.extend(made.logprobs)
        self._spans[-1:] = merged((*self._spans[-1:], *(span.moved(start) for span in made.spans)))
        if made.top_logprobs is not None:
            self._top_logprobs = self._top_logprobs or []
            self._top_logprobs += made.top_logprobs
        if made.packed_sampling_mask is not None:
            self._masks = self._masks or []
            self._masks += made.packed_sampling_mask
            self._mask_starts += [start] * len(made.packed_sampling_mask)
        self.finish_reason, self.stop_reason = made.finish_reason, made.stop_reason

    def since(self, start: int, replica_id: str | None) -> Completion:
        """Return the tokens after ``start``, which must be the end of a piece; spans count from there and name the
        replica."""
        return Completion(
            index=self.index,
            token_ids=tuple(self._token_ids[start:]),
            logprobs=tuple(self._logprobs[start:]),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            spans=tuple(
                span.model_copy(
                    update={"start": max(0, span.start - start), "end": span.end - start, "replica_id": replica_id}
                )
                for span in self._spans
                if span.end > start
            ),
            top_logprobs=None if self._top_logprobs is None else tuple(self._top_logprobs[start:]),
            packed_sampling_mask=None
            if self._masks is None
            else tuple(self._masks[bisect_left(self._mask_starts, start) :]),
        )


class Record:
    """A running call on one replica."""

    def __init__(self, number: int, num_completions: int) -> None:
        self.number = number
        self.replica_id: str | None = None
        """The replica that took the call; None: none so far."""
        self.drafts = tuple(Draft(index) for index in range(num_completions))
        self.early: list[tuple[str, Piece]] = []
        """Pieces that replicas reported before the router named the call's replica."""
        self._on_more: Callable[[], None] | None = None

    def on_more(self, call: Callable[[], None]) -> None:
        """Call ``call`` whenever tokens arrive."""
        self._on_more = call

    def add(self, piece: Piece) -> None:
        """Append a piece that the replica reported."""
        self.drafts[piece.made.index].add(piece.start, piece.made)
        if self._on_more is not None:
            self._on_more()

    @property
    def is_empty(self) -> bool:
        """Return True if no token has arrived."""
        return not any(len(draft) for draft in self.drafts)

    def completions(self) -> tuple[Completion, ...]:
        """Return all completions so far; ``finish_reason`` is "abort" for those that have not ended."""
        return tuple(draft.since(0, self.replica_id) for draft in self.drafts)


class Follower:
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
        self._records: dict[int, Record] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    @contextmanager
    def follow(self, num_completions: int) -> Iterator[Record]:
        """Track a running call within this context. The call must carry the record's ``number``."""
        if not self._records:
            loop = asyncio.get_running_loop()

            def placed(number: int, replica_id: str) -> None:
                loop.call_soon_threadsafe(self._placed, number, replica_id)

            self._placements.listen(self._origin, placed)
        record = Record(next(self._numbers), num_completions)
        self._records[record.number] = record
        try:
            yield record
        finally:
            del self._records[record.number]
            if not self._records:
                self._placements.forget(self._origin)

    def _placed(self, number: int, replica_id: str) -> None:
        record = self._records.get(number)
        if record is None:  # already answered, or refused
            return
        record.replica_id = replica_id
        for teller, piece in record.early:
            if teller == replica_id:
                record.add(piece)
        record.early.clear()
        if replica_id not in self._asking:
            self._asking[replica_id] = asyncio.create_task(
                self._ask(replica_id),
                name=f"progress of {replica_id}",
                context=Context(),  # an empty context, not that of the first request with its trace
            )

    async def _ask(self, replica_id: str) -> None:
        """Poll a replica while it has calls."""
        acknowledged = 0
        try:
            while any(record.replica_id == replica_id for record in self._records.values()):
                ask = ProgressAsk(
                    replica_id=replica_id,
                    origin=self._origin,
                    acknowledged=acknowledged,
                    # divided among replicas, so that the autoscaler, which adds up, counts the queue once
                    queued=-(-self._queued() // len(self._asking)),
                )
                try:
                    reply = await self._engine.progress(ask)
                except RolloutServiceError as error:
                    level = logging.DEBUG if isinstance(error, NotReady) else logging.WARNING
                    logger.log(level, "%s does not tell what it has made: %s", replica_id, error)
                    await self._sleep(RETRY_S)
                    continue
                acknowledged = reply.number
                for piece in reply.pieces:
                    record = self._records.get(piece.call)
                    if record is None:
                        continue
                    if record.replica_id is None:  # the reply and the placement come on two of Serve's threads
                        record.early.append((replica_id, piece))
                    elif record.replica_id == replica_id:
                        record.add(piece)
        finally:
            del self._asking[replica_id]
