"""Cut tensors into parts. One thread copies each tensor once, from its device into the memory that is sent.

CPU tensors that stay unchanged until they are sent are not copied. Other threads hash and send, because the copying
thread takes part in collectives while other ranks wait. Torch is imported at first use, so that a client that only
generates does not load it.
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
"""Minimum bytes of a tensor that are sent without a copy. Each piece of a part costs one acquisition of the GIL."""


class Part:
    """Bytes ``[index * part_bytes, ...)`` of the stream, or one part of a delta."""

    def __init__(
        self,
        index: int,
        tensors: Sequence[torch.Tensor],
        memory: torch.Tensor | None,
        copies: Iterable[torch.cuda.Event] = (),
        counts: int | None = None,
    ) -> None:
        """Create a part.

        Args:
            tensors: the part's bytes, in order, each uint8 [N] on the CPU.
            memory: uint8 [part_bytes] that some of the tensors are slices of. None: no tensor is owned by the part.
            copies: events of GPU copies that may still be running.
            counts: bytes that progress reports count for this part. None: ``nbytes``.
        """
        self.index, self.memory, self.nbytes = index, memory, sum(tensor.nbytes for tensor in tensors)
        self.counts = self.nbytes if counts is None else counts
        self._tensors, self._copies = tuple(tensors), tuple(copies)

    @cached_property
    def pieces(self) -> list[memoryview]:
        """The bytes in order. Waits for running copies."""
        for copy in self._copies:
            copy.synchronize()
        return [tensor.numpy().data for tensor in self._tensors]

    @property
    def data(self) -> memoryview:
        """The bytes in one piece; copied if there are several pieces."""
        return self.pieces[0] if len(self.pieces) == 1 else memoryview(b"".join(self.pieces))

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of the bytes, in hex."""
        hasher = xxhash.xxh3_128()
        for piece in self.pieces:
            hasher.update(piece)
        return hasher.hexdigest()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        # in chunks, because every layer of httpx copies its input
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
    """Cut a stream into parts. A part holds copies, which a GPU may still be writing, or views of held CPU tensors.

    Args:
        stream: tensors uint8 [N], in order, see ``bytes_of_each``.
        free: memory of finished parts, for reuse. Allocating new memory is slower than the copy itself.
        held: True if the tensors stay unchanged until the parts are sent. Then at least ``VIEWED_BYTES`` of a CPU
            tensor are sent without a copy. False: each tensor is copied before the next is requested.
    """
    import torch

    index, filled = 0, 0
    memory: torch.Tensor | None = None
    begun, used = 0, 0  # offsets in ``memory``: the begin and the end of the copied bytes that are in no piece yet
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
                # torch copies with several threads and without the GIL
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
        del flat  # freed before the next tensor is made
    if filled:
        yield Part(index, [*pieces, *_copied(memory, begun, used)], memory, map(_recorded, devices))


def _copied(memory: torch.Tensor | None, begun: int, used: int) -> list[torch.Tensor]:
    """Return the copied bytes ``[begun, used)`` of a part's memory as a list of at most one tensor."""
    return [] if memory is None or begun == used else [memory[begun:used]]


def bytes_of_each(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yield each tensor's bytes (little-endian, row-major) as uint8 [N] on its device; copied only if not contiguous.

    Each tensor is freed before the next is gathered.
    """
    import torch

    for _, tensor in tensors:
        if tensor.requires_grad:  # checked first, because ``detach`` needs the GIL
            tensor = tensor.detach()
        yield tensor.contiguous().view(-1).view(torch.uint8)
        del tensor


def _recorded(device: torch.device) -> torch.cuda.Event:
    import torch

    recorded: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return recorded


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return uint8 [nbytes] of host memory. ``pinned``: registered with CUDA if possible."""
    import torch

    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            warn_of_pageable_memory(str(error))
    return torch.empty(nbytes, dtype=torch.uint8)


@cache
def warn_of_pageable_memory(why: str) -> None:
    """Warn once that copies from a GPU are slow."""
    logger.warning("there is no pinned memory to copy weights to, which makes a push slower: %s", why)
