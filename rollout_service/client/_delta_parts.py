"""Parts of a delta: one thread compares and builds them, others send them. ``_parts.py`` has those of a whole
version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import torch

from rollout_service.client._compare import Changed
from rollout_service.client._parts import Part
from rollout_service.protocol.delta_parts import TensorChange, encode_header


def part_of(index: int, first: int, changes: Sequence[Changed | None], tensor_bytes: int) -> Part:
    """Return one part.

    Args:
        first: table index of its first tensor.
        changes: the change of each of its tensors. None: the tensor is unchanged.
        tensor_bytes: the size of its tensors in bytes.
    """
    told = [None if each is None else TensorChange(len(each.encoded), each.digest) for each in changes]
    pieces = [encode_header(first, told), *(each.encoded for each in changes if each is not None)]
    # numpy copies without the GIL
    whole = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
    return Part(index, [torch.from_numpy(whole)], None, counts=tensor_bytes)


class PartsAsMade:
    """A queue that carries parts from the comparing threads to the event loop that created this object."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[Part | None] = asyncio.Queue()

    def add(self, part: Part) -> None:
        """Append a part. Thread-safe."""
        self._loop.call_soon_threadsafe(self._parts.put_nowait, part)

    def end(self) -> None:
        """Mark the end, after the last part. Thread-safe."""
        self._loop.call_soon_threadsafe(self._parts.put_nowait, None)

    async def __aiter__(self) -> AsyncIterator[Part]:
        while (part := await self._parts.get()) is not None:
            yield part
