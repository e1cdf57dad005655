"""A rollout while it is made, for one reader along.

Nothing is queued: a reader that is slow finds more at once when it looks again, in the record that is kept anyway.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import NamedTuple

from rollout_service.fleet.continuation import StopSearch, part
from rollout_service.fleet.progress import Record
from rollout_service.protocol.rollout import Completion, Rollout


class LivePiece(NamedTuple):
    """More of one completion."""

    made: Completion
    """These tokens alone; spans count from the first of them. ``finish_reason`` is "abort" until the last piece."""
    start: int
    """Tokens that came before."""
    is_last: bool
    """Of this completion. It may have no token, and ends "abort" if it was cut short for good."""


@dataclass
class _Growing:
    """Where one completion is being made."""

    base: Completion | None
    """What was there before this generation."""
    record: Record
    place: int
    """Of the completion in the record."""
    search: StopSearch | None
    """For stop strings that the engine of this generation does not find, or finds in its prompt."""
    looked_at: int = 0
    """Tokens of this generation that the search has seen."""
    end: int | None = None
    """How many of them there are up to the one that completes a stop string; None: no such token yet."""


class LiveRollout:
    """The completions of one call.

    What was shown is never taken back. So a completion that would start anew if it were cut short is shown when it has
    ended, and of one that went on nothing is shown before a stop string was looked for in it.
    """

    def __init__(self, num_completions: int) -> None:
        self._num_completions = num_completions
        self._growing: dict[int, _Growing] = {}
        self._shown = [0] * num_completions
        self._ended: set[int] = set()
        self._more = asyncio.Event()

    def watch(self, record: Record, new_search: Callable[[], StopSearch | None] = lambda: None) -> None:
        """The first generation begins, or begins again since it was refused, with all completions.

        ``new_search``: returns the search of one completion.
        """
        record.on_more(self._more.set)
        self._growing = {index: _Growing(None, record, index, new_search()) for index in range(self._num_completions)}

    def watch_rest(self, base: Completion, record: Record, search: StopSearch | None = None) -> None:
        """What is left of the completion ``base`` is being made."""
        record.on_more(self._more.set)
        self._growing[base.index] = _Growing(base, record, 0, search)

    async def pieces(self, making: asyncio.Task[Rollout]) -> AsyncGenerator[LivePiece]:
        """More of a completion each time, until ``making`` has made all of them; raises what it raises.

        Closing this, or cancelling who waits in it, cancels ``making``.
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
        # the last piece, which says how it ended, comes with the rollout, and has the token that ends it
        up_to = part(made, 0, max(0, growing.end - 1 - so_far))
        return up_to.model_copy(update={"finish_reason": "abort", "stop_reason": None})
