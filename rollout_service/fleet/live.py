"""Incremental view of a running rollout for one streaming client.

Nothing is queued: a slow client gets more tokens at once from the record, which is kept in any case.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import NamedTuple

from rollout_service.fleet.continuation import StopSearch, part
from rollout_service.fleet.progress import Record
from rollout_service.protocol.rollout import Completion, Rollout


class LivePiece(NamedTuple):
    """New tokens of one completion."""

    made: Completion
    """These tokens alone; spans count from the first of them. ``finish_reason`` is "abort" until the last piece."""
    start: int
    """Number of tokens before these."""
    is_last: bool
    """True for the completion's last piece. It may be without tokens; its ``finish_reason`` is "abort" if the
    completion was aborted for good."""


@dataclass
class _Growing:
    """The running generation of one completion."""

    base: Completion | None
    """The completion before this generation."""
    record: Record
    place: int
    """Index of the completion in the record."""
    search: StopSearch | None
    """Search for stop strings that this generation's engine misses, or finds in its prompt."""
    looked_at: int = 0
    """Number of tokens of this generation that were searched."""
    end: int | None = None
    """Number of tokens up to the one that completes a stop string; None: not found yet."""


class LiveRollout:
    """The running completions of one call.

    Tokens that were sent are never withdrawn. A completion that would start anew after an interruption is therefore
    sent when it has ended. Tokens of a continuation are sent after the search for stop strings.
    """

    def __init__(self, num_completions: int) -> None:
        self._num_completions = num_completions
        self._growing: dict[int, _Growing] = {}
        self._shown = [0] * num_completions
        self._ended: set[int] = set()
        self._more = asyncio.Event()

    def watch(self, record: Record, new_search: Callable[[], StopSearch | None] = lambda: None) -> None:
        """Watch a generation of all completions. Called again after each refusal.

        ``new_search``: returns the search of one completion.
        """
        record.on_more(self._more.set)
        self._growing = {index: _Growing(None, record, index, new_search()) for index in range(self._num_completions)}

    def watch_rest(self, base: Completion, record: Record, search: StopSearch | None = None) -> None:
        """Watch the generation that continues the completion ``base``."""
        record.on_more(self._more.set)
        self._growing[base.index] = _Growing(base, record, 0, search)

    async def pieces(self, making: asyncio.Task[Rollout]) -> AsyncGenerator[LivePiece]:
        """Yield new tokens until ``making`` has all completions; raises its errors.

        Closing this generator, or cancelling its consumer, cancels ``making``.
        """
        making.add_done_callback(lambda _: self._more.set())
        try:
            while not making.done():
                await self._more.wait()
                self._more.clear()
                while not making.done() and (new := self._new_pieces()):
                    for piece in new:
                        yield piece
            for completion in making.result().completions:
                if completion.index not in self._ended:
                    shown = self._shown[completion.index]
                    yield LivePiece(part(completion, shown, len(completion.token_ids)), shown, is_last=True)
        finally:
            making.cancel()

    def _new_pieces(self) -> list[LivePiece]:
        pieces = []
        for index, growing in self._growing.items():
            if index in self._ended:
                continue
            piece = self._new_piece(index, growing)
            has_ended = piece.finish_reason != "abort"
            if piece.token_ids or has_ended:
                pieces.append(LivePiece(piece, self._shown[index], has_ended))
                self._shown[index] += len(piece.token_ids)
            if has_ended:
                self._ended.add(index)
        return pieces

    def _new_piece(self, index: int, growing: _Growing) -> Completion:
        base, shown = growing.base, self._shown[index]
        of_base = 0 if base is None else len(base.token_ids)
        if base is not None and shown < of_base:
            return part(base, shown, of_base)
        draft = growing.record.drafts[growing.place]
        made = draft.since(shown - of_base, growing.record.replica_id).model_copy(update={"index": index})
        if growing.search is None:
            return made
        so_far = shown - of_base
        if growing.end is None:
            new = made.token_ids[growing.looked_at - so_far :]
            found = growing.search.end_in(new)
            growing.looked_at += len(new)
            if found is not None:
                growing.end = found[0]
            elif growing.search.refutes(made, -so_far):
                growing.end = growing.looked_at
        if growing.end is None:
            return made
        # the last piece, with the finish reason and the stop token, comes with the rollout
        up_to = part(made, 0, max(0, growing.end - 1 - so_far))
        return up_to.model_copy(update={"finish_reason": "abort", "stop_reason": None})
