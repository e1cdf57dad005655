"""Puts converted tensors where a log in memory has them, and has a GPU hash them, if there is one.

What lies on the GPU is hashed there as it is copied to its room: the digest is of the codes as they were made. Whether
the bytes in the log are those, the workers find out that load them, as they do for a byte that changes there later.
What lies on the host, such as a delta's tensors, is hashed on the GPU, too, from its room: faster than by threads.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from rollout_service.gpu_streams import lies_on_gpu, own_stream_of
from rollout_service.quant.verdicts import Verdicts
from rollout_service.ring import aligned
from rollout_service.store.manifest import CHUNK_BYTES
from rollout_service.store.tensor_places import TensorPlace
from rollout_service.store.writer import VersionWriter
from rollout_service.threads import STRETCH_BYTES, in_threads, stretches

_HELD_BYTES = 384 << 20
"""That are stored or hashed at once: a kernel or a few for all of them, and one wait."""
_PACKED_BYTES = 4 << 20
"""A tensor that is larger is copied by itself: the call costs less than moving it twice."""
_LEAST_PACKED = 8
"""Of fewer neighbours each is copied by itself: that costs less than to say where they are."""
_SCRATCH_BYTES = 32 << 20
"""Of the GPU, for what is copied there to be hashed."""


class _Held(NamedTuple):
    place: TensorPlace
    data: torch.Tensor | None
    """Contiguous, on the GPU: kept until it has been copied. None: it is in its room."""


class Rooms:
    """Those of one version, for one thread. A context manager: all is stored once it ends, unless it fails."""

    def __init__(
        self,
        writer: VersionWriter,
        gpu: torch.device | None,
        verdicts: Verdicts,
        turn: "threading.Lock | None" = None,
    ) -> None:
        """
        Args:
            gpu: with which rooms are registered; None: with none, and what lies on the host is hashed there.
            verdicts: of the tensors on a GPU, which count as stored once these are required.
            turn: held while the context lasts, but for waits for the GPU: of threads that share it, one works while
                the others wait. Python runs one at a time anyhow, and to take its lock from each other after every
                call of torch takes longer than the calls.
        """
        self._writer, self._gpu, self._verdicts, self._turn = writer, gpu, verdicts, turn
        self._held: list[_Held] = []
        self._held_bytes = 0

    def __enter__(self) -> Self:
        if self._turn is not None:
            self._turn.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._store()
        finally:
            if self._turn is not None:
                self._turn.release()

    @contextmanager
    def _others_turn(self) -> Iterator[None]:
        if self._turn is None:
            yield
            return
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor, or hold it until many are stored at once."""
        place = self._writer.place(name)
        if (nbytes := tensor.nbytes) != place.nbytes:
            raise ValueError(f"{name} has {nbytes} bytes, its slot {place.nbytes}")
        if tensor.requires_grad:  # asked, because to detach is a turn with Python's lock
            tensor = tensor.detach()
        on_gpu = lies_on_gpu(tensor)
        if nbytes and not on_gpu:
            _copy(self._writer.room(name), _bytes_of(tensor.contiguous()))
        if not nbytes or not (on_gpu or self._gpu):
            self._writer.filled(name)
            return
        self._held.append(_Held(place, tensor.contiguous() if on_gpu else None))
        self._held_bytes += nbytes
        if self._held_bytes >= _HELD_BYTES:
            self._store()

    def _store(self) -> None:
        """Hash what is held, copy what is not in its room, wait for both, and require what was asked of it."""
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
            return self._writer.room(held[which].place.name)[start : start + CHUNK_BYTES]

        with own_stream_of(device) as stream:
            scratch = torch.empty(
                _SCRATCH_BYTES if any(each.data is None for each in held) else 0, dtype=torch.uint8, device=device
            )
            groups = self._groups(held, scratch)
            hashing = Hashing([_chunks(group.pieces) for group in groups], device)
            try:
                for number, group in enumerate(groups):
                    for copy in group.copies:
                        copy.scratch.copy_(torch.frombuffer(copy.in_room, dtype=torch.uint8), non_blocking=True)
                    hashing.queue(number)
                self._copy_to_rooms(held, device)
                hashing.collect()
                require_sound = self._verdicts.collect()
            finally:  # nothing is copied to a room that is given up
                if stream is not None:
                    with self._others_turn():
                        stream.synchronize()
            require_sound()
            digests = hashing.read(short)
        self._writer.filled_and_hashed((each.place for each in held), digests)

    def _copy_to_rooms(self, held: Sequence[_Held], device: torch.device) -> None:
        """Queue the copies of what lies on the GPU: many small neighbours are put side by side there, and copied as
        one."""
        from rollout_service.grouped_copy import GroupedCopy  # needs triton, and a second to be imported

        on_gpu = [(each.place, each.data) for each in held if each.data is not None]
        small = [each for each in on_gpu if each[0].nbytes <= _PACKED_BYTES]
        alone = [each for each in on_gpu if each[0].nbytes > _PACKED_BYTES]
        copied: list[tuple[memoryview, torch.Tensor]] = []
        packing: list[npt.NDArray[np.int64]] = []
        end = 0
        for count, room in self._writer.joined_rooms(place for place, _ in small):
            several = small[end : (end := end + count)]
            if count < _LEAST_PACKED:
                alone += several
                continue
            packed = torch.empty(room.nbytes, dtype=torch.uint8, device=device)
            nbytes = np.array([place.nbytes for place, _ in several], np.int64)
            sources = np.array([data.data_ptr() for _, data in several], np.int64)
            packing.append(np.stack([sources, packed.data_ptr() + np.cumsum(nbytes) - nbytes, nbytes], axis=1))
            copied.append((room, packed))
        if packing:
            GroupedCopy(np.concatenate(packing), device).run()
        copied += ((self._writer.room(place.name), data) for place, data in alone)
        for room, data in copied:
            torch.frombuffer(room, dtype=torch.uint8).copy_(_bytes_of(data), non_blocking=True)

    def _groups(self, held: Sequence[_Held], scratch: torch.Tensor) -> list["_Group"]:
        """Their bytes, in order."""
        groups = [_Group([], [])]
        position = 0
        for (name, _, _, _, _, nbytes), data in held:
            if data is not None:
                groups[-1].pieces.append((data.data_ptr(), nbytes))
                continue
            room, first = self._writer.room(name), 0
            while first < nbytes:
                free = (scratch.nbytes - position) // CHUNK_BYTES * CHUNK_BYTES
                taken = nbytes - first if nbytes - first <= scratch.nbytes - position else free
                if taken <= 0:
                    groups.append(_Group([], []))
                    position = 0
                    continue
                place = scratch[position : position + taken]
                groups[-1].copies.append(_ToScratch(room[first : first + taken], place))
                groups[-1].pieces.append((place.data_ptr(), taken))
                first += taken
                position += aligned(taken)
        return groups


class _ToScratch(NamedTuple):
    in_room: memoryview
    scratch: torch.Tensor
    """uint8 on the GPU."""


class _Group(NamedTuple):
    """What needs the scratch once."""

    pieces: list[tuple[int, int]]
    """Addresses on the GPU, and bytes: all of a tensor, or whole chunks of it and the rest."""
    copies: list[_ToScratch]
    """Before they are hashed: one for all chunks of a piece, of which each would be a call."""


def _chunks(pieces: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """[chunks, 2]: address and bytes of each ``CHUNK_BYTES`` of these pieces, in order."""
    from rollout_service.quant.digests import chunks_of

    address, piece_bytes = np.array(pieces, np.int64).reshape(-1, 2).T
    piece, start, nbytes = chunks_of(piece_bytes, CHUNK_BYTES)
    return np.stack([address[piece] + start, nbytes], axis=1)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [nbytes] of a contiguous tensor that has some; without a copy."""
    return tensor.view(-1).view(torch.uint8)


def _copy(room: memoryview, data: torch.Tensor) -> None:
    target = torch.frombuffer(room, dtype=torch.uint8)
    if data.data_ptr() != target.data_ptr():  # or it was made there
        for _ in in_threads(lambda piece: target[piece].copy_(data[piece]), stretches(data.nbytes, STRETCH_BYTES)):
            pass
