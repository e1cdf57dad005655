"""The parts of one upload: received into its staged file, and noted in a journal, so that they survive a restart.

A part is received at its place in the file.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator

import torch
import xxhash

from rollout_service.ingest.sources.source import as_tensor
from rollout_service.model.convert import Named
from rollout_service.protocol.upload import DTYPE_BYTES, Slot, UploadTensor, placed
from rollout_service.runtime.groups import groups_of
from rollout_service.store.staged_file import StagedFile
from rollout_service.store.upload_record import JOURNAL, ReceivedPart, note_received, read_received

logger = logging.getLogger(__name__)
PARTS_OF_A_BUCKET = 4
"""A bucket is converted once all of its parts are there: with several, few kernel launches make many tensors."""
_HASHED_BYTES = 16 << 20


class Incoming:
    """A part that one sender is sending. ``open``, ``write`` and ``close`` are called in the sender's thread."""

    def __init__(self, part: int, slot: Slot, file: StagedFile, abort: Callable[[], None]) -> None:
        """``abort``: ends the sending."""
        self.part, self.nbytes, self.abort = part, slot.nbytes, abort
        self.ended = asyncio.Event()
        self.memory: memoryview | None = None
        """Memory to receive into; None: use ``write``."""
        self._offset, self._file, self._fd = slot.offset, file, -1

    def open(self) -> None:
        """Map the place of the part, or open the file. Raises OSError."""
        self.memory = self._file.memory(self._offset, self.nbytes)
        if self.memory is None:  # a descriptor of its own: the upload may be discarded meanwhile
            self._fd = self._file.descriptor()

    def write(self, start: int, data: memoryview) -> None:
        """Write a piece from offset ``start`` of the part on, if there is no memory. Raises OSError."""
        while self._fd >= 0 and data.nbytes:
            written = os.pwrite(self._fd, data, self._offset + start)
            start, data = start + written, data[written:]

    def close(self) -> None:
        """Close what ``open`` has opened."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.memory = -1, None


class StagedParts:
    """The parts of one upload. Lives in the ingest's event loop, except ``read``."""

    def __init__(self, file: StagedFile, slots: tuple[Slot, ...]) -> None:
        """``slots``: the place of each part. A part of a delta may be smaller than its slot."""
        self.file, self._slots = file, slots
        self.missing = set(range(len(slots)))
        """Numbers of the parts that have not arrived."""
        self.digests: dict[int, str] = {}
        """Digests of the received parts."""
        self.sizes: dict[int, int] = {}
        """Sizes in bytes of the received parts."""
        self._receiving: dict[int, Incoming] = {}

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of all received parts."""
        return sum(self.sizes.values())

    @property
    def is_receiving(self) -> bool:
        """Return True while a sender writes into the file."""
        return bool(self._receiving)

    def begin(self, part: int, nbytes: int, abort: Callable[[], None]) -> Incoming:
        """Begin to receive a part of ``nbytes`` that nobody is sending; call ``end`` with the result."""
        incoming = Incoming(part, self._slots[part]._replace(nbytes=nbytes), self.file, abort)
        self._receiving[part] = incoming
        return incoming

    def receiving(self, part: int) -> Incoming | None:
        """Return the part that is being sent; None: it is not."""
        return self._receiving.get(part)

    def end(self, incoming: Incoming) -> None:
        """Allow others to write to the place of the part."""
        self._receiving.pop(incoming.part, None)
        incoming.ended.set()

    def add(self, incoming: Incoming, digest: str) -> None:
        """Note that the place of the part has its bytes. Raises OSError."""
        received = ReceivedPart(incoming.part, incoming.nbytes, digest)
        note_received(self.file.path.parent, received)
        self._note(received)

    def _note(self, received: ReceivedPart) -> None:
        self.sizes[received.part], self.digests[received.part] = received.nbytes, received.digest
        self.missing.discard(received.part)

    def forget(self, part: int) -> None:
        """Note that the place of the part is about to get other bytes."""
        del self.digests[part], self.sizes[part]
        self.missing.add(part)

    def recover(self) -> Iterator[int]:
        """Note and yield each undamaged part that an earlier process received. Raises OSError."""
        for received in read_received(self.file.path.parent):
            part, nbytes, digest = received
            is_valid = part < len(self._slots) and nbytes <= self._slots[part].nbytes
            if is_valid and self._digest(part, nbytes) == digest:
                self._note(received)
                yield part

    def _digest(self, part: int, nbytes: int) -> str | None:
        hasher, offset = xxhash.xxh3_128(), self._slots[part].offset
        try:
            for start in range(0, nbytes, _HASHED_BYTES):
                hasher.update(self.file.read(offset + start, min(_HASHED_BYTES, nbytes - start)))
        except OSError as error:
            logger.warning("%s cannot be read, and its part %d is asked for again: %s", self.file.path, part, error)
            return None
        return hasher.hexdigest()

    def read(self, part: int, start: int, nbytes: int) -> memoryview:
        """Return bytes of a received part. Raises OSError."""
        data = self.file.read(self._slots[part].offset + start, nbytes)
        return data if self.file.is_mapped else memoryview(bytes(data))  # the next call overwrites the buffer

    @property
    def modified_at(self) -> float:
        """Return the time at which the last part came, as the file system has it. Raises OSError."""
        return self.file.path.with_name(JOURNAL).stat().st_mtime


class StreamBucket:
    """Consecutive tensors of a stream, which lie together in its staged file."""

    def __init__(self, tensors: tuple[UploadTensor, ...], offset: int, part_bytes: int) -> None:
        """``offset``: of the first tensor in the stream, in bytes."""
        self.tensors, self.offset = tensors, offset
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.first_part, self.last_part = offset // part_bytes, (offset + max(self.nbytes, 1) - 1) // part_bytes
        """Numbers of the first and last part that hold bytes of it."""
        self.parts = range(self.first_part, self.last_part + 1) if self.nbytes else range(0)

    def read(self, file: StagedFile) -> Iterator[Named]:
        """Yield all tensors. Raises OSError."""
        data, start = file.read(self.offset, self.nbytes), 0
        for tensor in self.tensors:
            if (self.offset + start) % DTYPE_BYTES[tensor.dtype]:  # not aligned for its dtype
                copy = memoryview(bytearray(data[start : start + tensor.nbytes]))
                yield tensor.name, as_tensor(copy, tensor.dtype, tensor.shape)
            else:
                yield tensor.name, as_tensor(data, tensor.dtype, tensor.shape, start)
            start += tensor.nbytes

    def copied(self, file: StagedFile, gpu: torch.device, nbytes: int) -> torch.Tensor:
        """Return a copy on the GPU, uint8 [nbytes], as ``GpuBatch.copied`` does. The file must be registered."""
        target = torch.empty(nbytes, dtype=torch.uint8, device=gpu)
        copies, begin = [], self.offset
        for tensor, start in placed(self.tensors, 0):
            copies.append((begin, start, tensor.nbytes))
            begin += tensor.nbytes
        for source, start, count in coalesced(copies):
            file.copy_to(target[start : start + count], source)
        return target


def stream_buckets(tensors: tuple[UploadTensor, ...], part_bytes: int) -> list[StreamBucket]:
    """Return the buckets of a stream: up to ``PARTS_OF_A_BUCKET`` parts each, or a single larger tensor."""
    buckets, offset = [], 0
    for several in groups_of(tensors, lambda tensor: tensor.nbytes, PARTS_OF_A_BUCKET * part_bytes):
        buckets.append(StreamBucket(tuple(several), offset, part_bytes))
        offset += buckets[-1].nbytes
    return buckets


def coalesced(copies: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join consecutive copies whose sources and targets are equally far apart, with the bytes between them.

    Each copy is its source offset, its target offset, and its size in bytes.
    """
    source = target = nbytes = 0
    for from_, to, count in copies:
        if not count:
            continue
        if nbytes and from_ - source == to - target:
            nbytes = to - target + count
            continue
        if nbytes:
            yield source, target, nbytes
        source, target, nbytes = from_, to, count
    if nbytes:
        yield source, target, nbytes
