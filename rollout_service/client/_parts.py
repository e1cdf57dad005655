"""Tensors become parts: one thread copies each tensor once, from its device, into the memory that is sent.

What lies on the CPU, and stays as it is until it is sent, is not copied. All else (hashing, sending) is done by others:
what gathers tensors takes part in collectives, and other ranks wait for it. Torch is imported where it is needed, which
is not in a client that only generates.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("rollout_service.client")

BODY_CHUNK_BYTES = 1 << 20


VIEWED_BYTES = 1 << 20
"""Fewer of one tensor are copied, since each piece of a part is a turn of its own with Python's lock."""


class Part:
    """Bytes ``[index * part_bytes, ...)`` of the stream, or a part of a delta."""

    def __init__(
        self,
        index: int,
        tensors: Sequence[torch.Tensor],
        memory: torch.Tensor | None,
        copies: Iterable[torch.cuda.Event] = (),
        counts: int | None = None,
    ) -> None:
        """
        Args:
            tensors: the part's bytes, uint8 [N] each on the CPU, one after the other.
            memory: uint8 [part_bytes], of which some of them are slices; None: they are all of somebody else's memory.
            copies: from GPUs, that may be under way still.
            counts: bytes of the tensors that it is about; None: it holds them.
        """
        self.index, self.memory, self.nbytes = index, memory, sum(tensor.nbytes for tensor in tensors)
        self.counts = self.nbytes if counts is None else counts
        self._tensors, self._copies = tuple(tensors), tuple(copies)

    @cached_property
    def pieces(self) -> list[memoryview]:
        """The bytes, one after the other; waits for copies that are under way."""
        for copy in self._copies:
            copy.synchronize()
        return [tensor.numpy().data for tensor in self._tensors]

    @property
    def data(self) -> memoryview:
        """The bytes in one piece; a copy if there are several."""
        return self.pieces[0] if len(self.pieces) == 1 else memoryview(b"".join(self.pieces))

    @cached_property
    def digest(self) -> str:
        """xxh3-128 in hex."""
        hasher = xxhash.xxh3_128()
        for piece in self.pieces:
            hasher.update(piece)
        return hasher.hexdigest()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        # In chunks, because each layer of httpx copies what it is given.
        for piece in self.pieces:
            for start in range(0, piece.nbytes, BODY_CHUNK_BYTES):
                yield bytes(piece[start : start + BODY_CHUNK_BYTES])


def cut_parts(
    stream: Iterable[torch.Tensor],
    part_bytes: int,
    free: list[torch.Tensor] | None = None,
    *,
    held: bool = False,
) -> Iterator[Part]:
    """Cut a stream into parts. What they hold is a copy, which a GPU may be making still, or a held tensor on the CPU.

    Args:
        stream: tensors uint8 [N], one after the other, see ``bytes_of_each``.
        free: memory of parts that are done with, to be used again; fresh memory costs more than what is copied.
        held: the tensors stay what they are until the parts are sent: those on the CPU are not copied, if it is
            ``VIEWED_BYTES`` or more that a part has of one. If not held, one is copied before the next is made.
    """
    import torch

    index, filled = 0, 0
    memory: torch.Tensor | None = None
    begun, used = 0, 0  # of memory: where the copies that are no piece yet begin, and where they end
    pieces: list[torch.Tensor] = []
    devices: set[torch.device] = set()
    for flat in stream:
        start, count, from_gpu = 0, flat.nbytes, flat.is_cuda
        while start < count:
            taken = min(count - start, part_bytes - filled)
            if held and not from_gpu and taken >= VIEWED_BYTES:
                pieces += _copied(memory, begun, used)
                pieces.append(flat[start : start + taken])
                begun = used
            else:
                if memory is None:
                    memory = free.pop() if free else host_memory(part_bytes, pinned=from_gpu)
                room = memory[used : used + taken]
                # torch copies with several threads, and with Python's lock free
                room.copy_(flat if taken == count else flat[start : start + taken], non_blocking=from_gpu)
                if from_gpu:
                    devices.add(flat.device)
                used += taken
            filled, start = filled + taken, start + taken
            if filled == part_bytes:
                yield Part(index, [*pieces, *_copied(memory, begun, used)], memory, map(_recorded, devices))
                index, memory, filled, begun, used, pieces, devices = index + 1, None, 0, 0, 0, [], set()
        if from_gpu and not held:
            torch.cuda.current_stream(flat.device).synchronize()
        del flat  # before the next is made
    if filled:
        yield Part(index, [*pieces, *_copied(memory, begun, used)], memory, map(_recorded, devices))


def _copied(memory: torch.Tensor | None, begun: int, used: int) -> list[torch.Tensor]:
    """What was copied into these bytes of a part's memory, in one piece, if anything was."""
    return [] if memory is None or begun == used else [memory[begun:used]]


def bytes_of_each(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Each tensor's bytes (little-endian, row-major) as uint8 [N] on its device; no copy if it is contiguous.

    A tensor is let go before the next is gathered.
    """
    import torch

    for _, tensor in tensors:
        if tensor.requires_grad:  # asked, because to detach is a turn with Python's lock
            tensor = tensor.detach()
        yield tensor.contiguous().view(-1).view(torch.uint8)
        del tensor


def _recorded(device: torch.device) -> torch.cuda.Event:
    import torch

    recorded: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return recorded


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """uint8 [nbytes]; ``pinned``: registered with CUDA, if it lets us."""
    import torch

    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            warn_of_pageable_memory(str(error))
    return torch.empty(nbytes, dtype=torch.uint8)


@cache
def warn_of_pageable_memory(why: str) -> None:
    """Say once that copies from a GPU are slow."""
    logger.warning("there is no pinned memory to copy weights to, which makes a push slower: %s", why)
