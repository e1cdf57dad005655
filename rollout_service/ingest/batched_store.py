"""Store converted tensors in a log in memory, and hash them on a GPU, if there is one.

Tensors on the GPU are hashed there while they are copied to their slots, so the digest covers the bytes as produced.
The workers that load them compare it with the bytes in the log, which also finds later changes. Tensors on the host,
such as a delta's, are copied from their slots to the GPU and hashed there, which is faster than with threads.
"""

import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from rollout_service.gpu.streams import lies_on_gpu, own_stream_of
from rollout_service.protocol.ring import aligned
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.runtime.threads import STRETCH_BYTES, in_threads, stretches
from rollout_service.store.layout import TensorPlace
from rollout_service.store.manifest import CHUNK_BYTES
from rollout_service.store.writer import VersionWriter

_HELD_BYTES = 384 << 20
"""Bytes per batch that is stored and hashed: few kernel launches and one synchronization."""
_PACKED_BYTES = 4 << 20
"""Size in bytes above which a tensor is copied by itself: the call costs less than moving it twice."""
_MIN_PACKED = 8
"""Minimum number of adjacent tensors that are packed. Fewer are copied one by one, which costs less than writing their
table."""
_SCRATCH_BYTES = 32 << 20
"""Size in bytes of the GPU buffer for host tensors that are hashed there."""


class _Held(NamedTuple):
    place: TensorPlace
    data: torch.Tensor | None
    """A contiguous tensor on the GPU, kept until it is copied. None: it is already in its slot."""


class BatchedStore:
    """Batched store of one version, for one thread. A context manager: at its end everything is stored, unless it
    fails."""

    def __init__(
        self,
        writer: VersionWriter,
        gpu: torch.device | None,
        checks: DeferredChecks,
        turn: threading.Lock,
    ) -> None:
        """
        Args:
            gpu: the GPU with which the slots are registered; None: none, and host tensors are hashed on the host.
            checks: checks of the tensors on a GPU, which count as stored once these checks pass.
            turn: held within the context, except while it waits for the GPU. Of the threads that share it, one works
                while the others wait. Passing the GIL between threads after every torch call would take longer than
                the calls themselves.
        """
        self._writer, self._gpu, self._checks, self._turn = writer, gpu, checks, turn
        self._held: list[_Held] = []
        self._held_bytes = 0

    def __enter__(self) -> Self:
        self._turn.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._store()
        finally:
            self._turn.release()

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor, or hold it until many are stored at once."""
        place = self._writer.place(name)
        if (nbytes := tensor.nbytes) != place.nbytes:
            raise ValueError(f"{name} has {nbytes} bytes, its slot {place.nbytes}")
        if tensor.requires_grad:  # test first, because detach() takes the GIL
            tensor = tensor.detach()
        on_gpu = lies_on_gpu(tensor)
        if nbytes and not on_gpu:
            _copy(self._writer.slot(name), _bytes_of(tensor.contiguous()))
        if not nbytes or not (on_gpu or self._gpu):
            self._writer.filled(name)
            return
        self._held.append(_Held(place, tensor.contiguous() if on_gpu else None))
        self._held_bytes += nbytes
        if self._held_bytes >= _HELD_BYTES:
            self._store()

    def _store(self) -> None:
        """Hash the held tensors, copy them into their slots, wait for both, and require that their checks pass."""
        from rollout_service.quant.digests import Hashing  # needs triton, and a second to be imported

        held, self._held, self._held_bytes = self._held, [], 0
        if not held:
            return
        device = next((each.data.device for each in held if each.data is not None), self._gpu)
        assert device is not None
        ends = list(accumulate(-(-each.place.nbytes // CHUNK_BYTES) for each in held))

        def short(number: int) -> memoryview:
            which = bisect_right(ends, number)
            start = (number - (ends[which - 1] if which else 0)) * CHUNK_BYTES
            return self._writer.slot(held[which].place.name)[start : start + CHUNK_BYTES]

        with own_stream_of(device) as stream:
            scratch = torch.empty(
                _SCRATCH_BYTES if any(each.data is None for each in held) else 0, dtype=torch.uint8, device=device
            )
            groups = self._groups(held, scratch)
            hashing = Hashing([_chunks(group.pieces) for group in groups], device)
            try:
                for number, group in enumerate(groups):
                    for in_slot, room in group.copies:
                        room.copy_(torch.frombuffer(in_slot, dtype=torch.uint8), non_blocking=True)
                    hashing.queue(number)
                self._copy_to_slots(held, device)
                hashing.collect()
                require_sound = self._checks.collect()
            finally:  # no copy may still be running into a slot that is given up
                if stream is not None:
                    self._turn.release()
                    try:
                        stream.synchronize()
                    finally:
                        self._turn.acquire()
            require_sound()
            digests = hashing.read(short)
        self._writer.filled_and_hashed((each.place for each in held), digests)

    def _copy_to_slots(self, held: Sequence[_Held], device: torch.device) -> None:
        """Queue the copies of tensors on the GPU. Many small adjacent tensors are packed there, and copied at once."""
        from rollout_service.gpu.grouped_copy import GroupedCopy  # needs triton, and a second to be imported

        on_gpu = [(each.place, each.data) for each in held if each.data is not None]
        small = [each for each in on_gpu if each[0].nbytes <= _PACKED_BYTES]
        alone = [each for each in on_gpu if each[0].nbytes > _PACKED_BYTES]
        copied: list[tuple[memoryview, torch.Tensor]] = []
        packing: list[npt.NDArray[np.int64]] = []
        end = 0
        for count, slot in self._writer.contiguous_slots(place for place, _ in small):
            several = small[end : (end := end + count)]
            if count < _MIN_PACKED:
                alone += several
                continue
            packed = torch.empty(slot.nbytes, dtype=torch.uint8, device=device)
            nbytes = np.array([place.nbytes for place, _ in several], np.int64)
            sources = np.array([data.data_ptr() for _, data in several], np.int64)
            packing.append(np.stack([sources, packed.data_ptr() + np.cumsum(nbytes) - nbytes, nbytes], axis=1))
            copied.append((slot, packed))
        if packing:
            GroupedCopy(np.concatenate(packing), device).run()
        copied += ((self._writer.slot(place.name), data) for place, data in alone)
        for slot, data in copied:
            torch.frombuffer(slot, dtype=torch.uint8).copy_(_bytes_of(data), non_blocking=True)

    def _groups(self, held: Sequence[_Held], scratch: torch.Tensor) -> list["_Group"]:
        """Return the tensors' bytes, in order, in groups that fit into the scratch buffer."""
        groups = [_Group([], [])]
        position = 0
        for (name, _, _, _, _, nbytes), data in held:
            if data is not None:
                groups[-1].pieces.append((data.data_ptr(), nbytes))
                continue
            slot, first = self._writer.slot(name), 0
            while first < nbytes:
                free = (scratch.nbytes - position) // CHUNK_BYTES * CHUNK_BYTES
                taken = nbytes - first if nbytes - first <= scratch.nbytes - position else free
                if taken <= 0:
                    groups.append(_Group([], []))
                    position = 0
                    continue
                place = scratch[position : position + taken]
                groups[-1].copies.append((slot[first : first + taken], place))
                groups[-1].pieces.append((place.data_ptr(), taken))
                first += taken
                position += aligned(taken)
        return groups


class _Group(NamedTuple):
    """Pieces that share one use of the scratch buffer."""

    pieces: list[tuple[int, int]]
    """GPU address and size of each piece: a whole tensor, or whole chunks of one and the rest."""
    copies: list[tuple[memoryview, torch.Tensor]]
    """Copies from slots to the scratch buffer, before hashing. One for all chunks of a piece: each is a call."""


def _chunks(pieces: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Return [chunks, 2]: address and size in bytes of each ``CHUNK_BYTES`` of these pieces, in order."""
    from rollout_service.quant.digests import chunks_of

    address, piece_bytes = np.array(pieces, np.int64).reshape(-1, 2).T
    piece, start, nbytes = chunks_of(piece_bytes, CHUNK_BYTES)
    return np.stack([address[piece] + start, nbytes], axis=1)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return uint8 [nbytes] of a contiguous, non-empty tensor, without a copy."""
    return tensor.view(-1).view(torch.uint8)


def _copy(slot: memoryview, data: torch.Tensor) -> None:
    target = torch.frombuffer(slot, dtype=torch.uint8)
    if data.data_ptr() != target.data_ptr():  # equal if the tensor was produced in its slot
        for _ in in_threads(lambda piece: target[piece].copy_(data[piece]), stretches(data.nbytes, STRETCH_BYTES)):
            pass
