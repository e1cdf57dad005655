"""Puts converted tensors where a log in memory has them, and has a GPU hash them, if there is one.

What lies on the GPU is hashed there as it is copied to its room: the digest is of the codes as they were made. Whether
the bytes in the log are those, the workers find out that load them, as they do for a byte that changes there later.
What lies on the host, such as a delta's tensors, is hashed on the GPU, too, from its room: faster than by threads.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple, Self

import torch

from rollout_service.gpu_streams import lies_on_gpu, own_stream
from rollout_service.quant.verdicts import Verdicts
from rollout_service.ring import aligned
from rollout_service.store.manifest import CHUNK_BYTES, DIGEST_BYTES
from rollout_service.store.writer import VersionWriter
from rollout_service.threads import STRETCH_BYTES, in_threads, stretches

_HELD_BYTES = 128 << 20
"""That are stored or hashed at once: a kernel or a few for all of them, and one wait."""
_PACKED_BYTES = 64 << 20
"""A tensor that is larger is copied by itself: the call costs less than moving it twice."""
_SCRATCH_BYTES = 32 << 20
"""Of the GPU, for what is copied there to be hashed."""


class _Held(NamedTuple):
    name: str
    data: torch.Tensor | None
    """uint8 [nbytes], on the GPU: kept until it has been copied. None: it is in its room."""
    room: memoryview


class Rooms:
    """Those of one version, for one thread. A context manager: all is stored once it ends, unless it fails."""

    def __init__(self, writer: VersionWriter, gpu: torch.device | None, verdicts: Verdicts) -> None:
        """
        Args:
            gpu: with which rooms are registered; None: with none, and what lies on the host is hashed there.
            verdicts: of the tensors on a GPU, which count as stored once these are required.
        """
        self._writer, self._gpu, self._verdicts = writer, gpu, verdicts
        self._held: list[_Held] = []
        self._held_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._store()

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor, or hold it until many are stored at once."""
        room = self._writer.room(name)
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
        if data.nbytes != room.nbytes:
            raise ValueError(f"{name} has {data.nbytes} bytes, its slot {room.nbytes}")
        on_gpu = lies_on_gpu(tensor)
        if not on_gpu:
            _copy(room, data)
        if not room.nbytes or not (on_gpu or self._gpu):
            self._writer.filled(name)
            return
        self._held.append(_Held(name, data if on_gpu else None, room))
        self._held_bytes += data.nbytes
        if self._held_bytes >= _HELD_BYTES:
            self._store()

    def _store(self) -> None:
        """Hash what is held, copy what is not in its room, wait for both, and require what was asked of it."""
        from rollout_service.quant.digests import Hashing, Run  # needs triton, and a second to be imported

        held, self._held, self._held_bytes = self._held, [], 0
        if not held:
            return
        device = next((each.data.device for each in held if each.data is not None), self._gpu)
        assert device is not None
        with own_stream(device) if device.type == "cuda" else nullcontext() as stream:
            scratch = torch.empty(
                _SCRATCH_BYTES if any(each.data is None for each in held) else 0, dtype=torch.uint8, device=device
            )
            groups = _groups(held, scratch)
            chunks = [chunk for group in groups for chunk in group.chunks]
            hashing = Hashing(
                [[Run(chunk.address, chunk.in_room.nbytes) for chunk in group.chunks] for group in groups], device
            )
            try:
                for number, group in enumerate(groups):
                    for copy in group.copies:
                        copy.scratch.copy_(torch.frombuffer(copy.in_room, dtype=torch.uint8), non_blocking=True)
                    hashing.queue(number)
                self._copy_to_rooms(held, device)
                hashing.collect()
                self._verdicts.collect()
            finally:  # nothing is copied to a room that is given up
                if stream is not None:
                    stream.synchronize()
            self._verdicts.require()
            found, at = hashing.read(lambda number: chunks[number].in_room), 0
        for each in held:
            end = at + -(-each.room.nbytes // CHUNK_BYTES) * DIGEST_BYTES
            self._writer.filled(each.name, found[at:end])
            at = end

    def _copy_to_rooms(self, held: Sequence[_Held], device: torch.device) -> None:
        """Queue the copies of what lies on the GPU: small neighbours are put side by side there, and copied as one."""
        from rollout_service.grouped_copy import GroupedCopy, Rows  # needs triton, and a second to be imported

        small: dict[str, torch.Tensor] = {}
        for each in held:
            if each.data is not None and each.data.nbytes <= _PACKED_BYTES:
                small[each.name] = each.data
            elif each.data is not None:
                torch.frombuffer(each.room, dtype=torch.uint8).copy_(each.data, non_blocking=True)
        joined: list[tuple[memoryview, torch.Tensor]] = []
        packing: list[Rows] = []
        for names, room in self._writer.joined_rooms(small):
            if len(names) == 1:
                joined.append((room, small[names[0]]))
                continue
            packed = torch.empty(room.nbytes, dtype=torch.uint8, device=device)
            target = packed.data_ptr()
            for name in names:
                packing.append(Rows(small[name].data_ptr(), target, small[name].nbytes))
                target += small[name].nbytes
            joined.append((room, packed))
        if packing:
            GroupedCopy(packing, device).run()
        for room, data in joined:
            torch.frombuffer(room, dtype=torch.uint8).copy_(data, non_blocking=True)


class _Chunk(NamedTuple):
    address: int
    """On the GPU."""
    in_room: memoryview


class _ToScratch(NamedTuple):
    in_room: memoryview
    scratch: torch.Tensor
    """uint8 on the GPU."""


class _Group(NamedTuple):
    """What needs the scratch once."""

    chunks: list[_Chunk]
    copies: list[_ToScratch]
    """Before they are hashed: one for all chunks of a tensor, of which each would be a call."""


def _groups(held: Sequence[_Held], scratch: torch.Tensor) -> list[_Group]:
    """Their chunks, in order."""
    groups = [_Group([], [])]
    position = 0
    for each in held:
        nbytes = each.room.nbytes
        if each.data is not None:
            starts = range(0, nbytes, CHUNK_BYTES)
            groups[-1].chunks.extend(
                _Chunk(each.data.data_ptr() + start, each.room[start : start + CHUNK_BYTES]) for start in starts
            )
            continue
        first = 0
        while first < nbytes:
            free = (scratch.nbytes - position) // CHUNK_BYTES * CHUNK_BYTES
            taken = nbytes - first if nbytes - first <= scratch.nbytes - position else free
            if taken <= 0:
                groups.append(_Group([], []))
                position = 0
                continue
            place = scratch[position : position + taken]
            groups[-1].copies.append(_ToScratch(each.room[first : first + taken], place))
            groups[-1].chunks.extend(
                _Chunk(place.data_ptr() + start, each.room[first + start : first + min(start + CHUNK_BYTES, taken)])
                for start in range(0, taken, CHUNK_BYTES)
            )
            first += taken
            position += aligned(taken)
    return groups


def _copy(room: memoryview, data: torch.Tensor) -> None:
    if not room.nbytes:
        return
    target = torch.frombuffer(room, dtype=torch.uint8)
    if data.data_ptr() != target.data_ptr():  # or it was made there
        for _ in in_threads(lambda piece: target[piece].copy_(data[piece]), stretches(data.nbytes, STRETCH_BYTES)):
            pass
