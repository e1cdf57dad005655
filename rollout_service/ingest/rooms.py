"""Puts converted tensors where a log in memory has them, and hashes them: what lies on a GPU there, as it is copied.

So the digest is of the codes as they were made. Whether the bytes in the log are those, the workers find out that load
them, as they do for a byte that changes there later.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Self

import torch

from rollout_service.gpu_streams import own_stream
from rollout_service.store.manifest import CHUNK_BYTES, DIGEST_BYTES
from rollout_service.store.writer import VersionWriter
from rollout_service.threads import STRETCH_BYTES, in_threads, stretches

_QUEUED_BYTES = 128 << 20
"""That are under way from a GPU before a thread waits for them."""


class _Queued(NamedTuple):
    name: str
    data: torch.Tensor
    """uint8 [nbytes], on the GPU: kept until it has been copied."""
    room: memoryview


class Rooms:
    """Those of one version, for one thread. A context manager: nothing is written there any more once it ends."""

    def __init__(self, writer: VersionWriter) -> None:
        self._writer = writer
        self._queued: list[_Queued] = []
        self._queued_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()
        elif self._queued:  # the rooms may be given up now
            with _stream(self._queued[0].data.device) as stream:
                if stream is not None:
                    stream.synchronize()
            self._queued = []

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor, or begin to: ``end`` does the rest."""
        room = self._writer.room(name)
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
        if data.nbytes != room.nbytes:
            raise ValueError(f"{name} has {data.nbytes} bytes, its slot {room.nbytes}")
        if not lies_on_gpu(tensor):
            _copy(room, data)
            self._writer.filled(name)
        elif room.nbytes:
            if self._queued_bytes + data.nbytes > _QUEUED_BYTES:
                self.end()
            with _stream(data.device):
                torch.frombuffer(room, dtype=torch.uint8).copy_(data, non_blocking=True)
            self._queued.append(_Queued(name, data, room))
            self._queued_bytes += data.nbytes
        else:
            self._writer.filled(name)

    def end(self) -> None:
        """Wait until all is stored."""
        from rollout_service.quant.digests import Hashing, Run  # needs triton, and a second to be imported

        queued, self._queued, self._queued_bytes = self._queued, [], 0
        if not queued:
            return
        chunks = [
            _Chunk(each, start, min(CHUNK_BYTES, each.data.nbytes - start))
            for each in queued
            for start in range(0, each.data.nbytes, CHUNK_BYTES)
        ]
        runs = [Run(chunk.of.data.data_ptr() + chunk.start, chunk.nbytes) for chunk in chunks]
        device = queued[0].data.device
        with _stream(device) as stream:
            hashing = Hashing([runs], device)
            hashing.queue(0)
            if stream is not None:
                stream.synchronize()  # the copies, too
            found, at = hashing.read(lambda number: chunks[number].in_room), 0
        for each in queued:
            end = at + -(-each.data.nbytes // CHUNK_BYTES) * DIGEST_BYTES
            self._writer.filled(each.name, found[at:end])
            at = end


class _Chunk(NamedTuple):
    of: _Queued
    start: int
    nbytes: int

    @property
    def in_room(self) -> memoryview:
        return self.of.room[self.start : self.start + self.nbytes]


def lies_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether its bytes are hashed on the device that has them."""
    return tensor.is_cuda


def _stream(device: torch.device) -> AbstractContextManager[torch.cuda.Stream | None]:
    return own_stream(device) if device.type == "cuda" else nullcontext()


def _copy(room: memoryview, data: torch.Tensor) -> None:
    if not room.nbytes:
        return
    target = torch.frombuffer(room, dtype=torch.uint8)
    if data.data_ptr() != target.data_ptr():  # or it was made there
        for _ in in_threads(lambda piece: target[piece].copy_(data[piece]), stretches(data.nbytes, STRETCH_BYTES)):
            pass
