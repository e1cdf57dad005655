"""The parts of a delta: made by the thread that compares, sent by others. Those of a version itself: ``_parts.py``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import torch

from rollout_service.client._compare import Changed
from rollout_service.client._parts import Part
from rollout_service.protocol.delta_parts import TensorChange, encode_header


def part_of(index: int, first: int, changes: Sequence[Changed | None], tensor_bytes: int) -> Part:
    """One part.

    Args:
        first: the first of its tensors, by its place in the table.
        changes: of each of its tensors; None: it is what it was.
        tensor_bytes: that its tensors have.
    """
    told = [None if each is None else TensorChange(len(each.encoded), each.digest) for each in changes]
    pieces = [encode_header(first, told), *(each.encoded for each in changes if each is not None)]
    # numpy copies with Python's lock free
    whole = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
    return Part(index, [torch.from_numpy(whole)], None, counts=tensor_bytes)


class PartsAsMade:
    """Parts on their way from the threads that make them to the event loop that has made this object."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[Part | None] = asyncio.Queue()

    def add(self, part: Part) -> None:
        """The next one. From any thread."""
        self._loop.call_soon_threadsafe(self._parts.put_nowait, part)

    def end(self) -> None:
        """There are no more. From any thread, after the last part was added."""
        self._loop.call_soon_threadsafe(self._parts.put_nowait, None)

    async def __aiter__(self) -> AsyncIterator[Part]:
        while (part := await self._parts.get()) is not None:
            yield part
