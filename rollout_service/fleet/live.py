"""A rollout while it is made, for one reader along.

Nothing is queued: a reader that is slow finds more at once when it looks again, in the record that is kept anyway.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple

from rollout_service.fleet.continuation import goes_on, part
from rollout_service.fleet.progress import Record
from rollout_service.protocol.rollout import Completion, Rollout
from rollout_service.protocol.sampling import Sampling


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


class LiveRollout:
    """The completions of one call.

    What was shown is never taken back. So a completion that would start anew if it were cut short (``goes_on``), or
    whose stop strings may lie across the seam of two generations, is shown when it has ended.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._growing: dict[int, _Growing] = {}
        self._shown = [0] * sampling.n
        self._ended: set[int] = set()
        self._more = asyncio.Event()

    def watch(self, record: Record) -> None:
        """The first generation begins, or begins again since it was refused: with all completions."""
        record.on_more(self._more.set)
        if goes_on(self._sampling):
            self._growing = {index: _Growing(None, record, index) for index in range(self._sampling.n)}

    def watch_rest(self, base: Completion, record: Record) -> None:
        """What is left of the completion ``base`` is being made."""
        record.on_more(self._more.set)
        self._growing.pop(base.index, None)
        if goes_on(self._sampling) and not self._sampling.stop:
            self._growing[base.index] = _Growing(base, record, 0)

    async def pieces(self, making: asyncio.Task[Rollout]) -> AsyncGenerator[LivePiece]:
        """More of a completion each time, until ``making`` has made all of them; raises what it raises.

        Closing this, or cancelling who waits in it, cancels ``making``.
        """
        making.add_done_callback(lambda _: self._more.set())
        try:
            while not making.done():
                await self._more.wait()
                self._more.clear()
                if not making.done():
                    for piece in self._new_pieces():
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
        return draft.since(shown - of_base, growing.record.replica_id).model_copy(update={"index": index})
