"""Puts converted tensors where a log in memory has them, and hashes them: what lies on a GPU there, as it is copied.

So the digest is of the codes as they were made. Whether the bytes in the log are those, the workers find out that load
them, as they do for a byte that changes there later.
"""

from contextlib import nullcontext
from typing import NamedTuple, Self

import torch

from rollout_service.gpu_streams import own_stream
from rollout_service.store.manifest import CHUNK_BYTES, DIGEST_BYTES
from rollout_service.store.writer import VersionWriter
from rollout_service.threads import STRETCH_BYTES, in_threads, stretches

_HELD_BYTES = 64 << 20
"""On a GPU, that are stored at once: a kernel for all of them, and one wait."""


class _Held(NamedTuple):
    name: str
    data: torch.Tensor
    """uint8 [nbytes], on the GPU: kept until it has been copied."""
    room: memoryview


class Rooms:
    """Those of one version, for one thread. A context manager: all is stored once it ends, unless it fails."""

    def __init__(self, writer: VersionWriter) -> None:
        self._writer = writer
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
        if not room.nbytes or not lies_on_gpu(tensor):
            _copy(room, data)
            self._writer.filled(name)
            return
        self._held.append(_Held(name, data, room))
        self._held_bytes += data.nbytes
        if self._held_bytes >= _HELD_BYTES:
            self._store()

    def _store(self) -> None:
        """Hash and copy what is held, and wait for both."""
        from rollout_service.quant.digests import Hashing, Run  # needs triton, and a second to be imported

        held, self._held, self._held_bytes = self._held, [], 0
        if not held:
            return
        chunks = [
            _Chunk(each, start, min(CHUNK_BYTES, each.data.nbytes - start))
            for each in held
            for start in range(0, each.data.nbytes, CHUNK_BYTES)
        ]
        runs = [Run(chunk.of.data.data_ptr() + chunk.start, chunk.nbytes) for chunk in chunks]
        device = held[0].data.device
        with own_stream(device) if device.type == "cuda" else nullcontext() as stream:
            hashing = Hashing([runs], device)
            try:
                hashing.queue(0)
                for each in held:
                    torch.frombuffer(each.room, dtype=torch.uint8).copy_(each.data, non_blocking=True)
            finally:  # nothing is copied to a room that is given up
                if stream is not None:
                    stream.synchronize()
            found, at = hashing.read(lambda number: chunks[number].in_room), 0
        for each in held:
            end = at + -(-each.data.nbytes // CHUNK_BYTES) * DIGEST_BYTES
            self._writer.filled(each.name, found[at:end])
            at = end


class _Chunk(NamedTuple):
    of: _Held
    start: int
    nbytes: int

    @property
    def in_room(self) -> memoryview:
        return self.of.room[self.start : self.start + self.nbytes]


def lies_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether its bytes are hashed on the device that has them."""
    return tensor.is_cuda


def _copy(room: memoryview, data: torch.Tensor) -> None:
    if not room.nbytes:
        return
    target = torch.frombuffer(room, dtype=torch.uint8)
    if data.data_ptr() != target.data_ptr():  # or it was made there
        for _ in in_threads(lambda piece: target[piece].copy_(data[piece]), stretches(data.nbytes, STRETCH_BYTES)):
            pass
