"""Tensors in memory that a trainer on this machine shares, of the host or of a GPU; converted as they come.

Host memory is read in place. GPU memory is first copied, within the GPU or over NVLink, since torch accepts no address
of a GPU that this process does not see.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch

from rollout_service.errors import InvalidRequest, NotShared
from rollout_service.gpu.memory import OtherGpuMemory
from rollout_service.ingest.conversion import Bucket, GpuBatch
from rollout_service.ingest.sources.source import as_tensor, of_dtype
from rollout_service.protocol.ring import aligned
from rollout_service.protocol.upload import (
    SHARED_ALIGNMENT,
    CudaIpcSource,
    SharedMemorySource,
    SharedTensors,
    UploadTensor,
    placed,
)
from rollout_service.runtime.shared_memory import SharedMemory, machine
from rollout_service.runtime.views import view_at
from rollout_service.store.mapped_files import Registered

logger = logging.getLogger(__name__)
_HOST_BYTES, GPU_BYTES = 32 << 20, 384 << 20
"""Bytes that one thread converts at a time, unless a trainer sends fewer at once. For host memory, hashing takes most
of the time. For GPU memory, larger batches amortize launches and waiting for a shared GPU."""
GPU_THREADS = 3
"""Number of threads that convert GPU memory, or parts that a GPU reads: one launches while the GPU runs the work of the
others. Each needs GPU memory for its batch and the result: 1.8 GB in all if BF16 becomes FP8, more if a tensor is
larger than ``GPU_BYTES``."""


class _HostMemory:
    """A trainer's memory on this host."""

    def __init__(self, memory: SharedMemory, registered: Registered | None) -> None:
        self.nbytes, self.group_bytes = memory.nbytes, _HOST_BYTES
        self._memory = memory
        self._unregister: Callable[[], None] | None = None if registered is None else registered(memory.view)

    def read(self, tensors: Sequence[UploadTensor], offset: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors from ``offset`` on, as views of the memory. Finish each one before requesting the next."""
        for tensor, start in placed(tensors, offset):
            data = self._memory.view[start : start + tensor.nbytes]
            yield tensor.name, as_tensor(data, tensor.dtype, tensor.shape)

    def close(self) -> None:
        if self._unregister is not None:
            self._unregister()
        self._memory.close()


class GpuMemory:
    """A staging buffer in a trainer's GPU memory."""

    def __init__(self, page: SharedMemory, memory: OtherGpuMemory) -> None:
        self.nbytes, self.group_bytes = memory.nbytes, GPU_BYTES
        self._page, self._memory = page, memory

    def read(self, tensors: Sequence[UploadTensor], offset: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors from ``offset`` on, on the GPU. Finish using each one before requesting the next."""
        places = list(placed(tensors, 0))
        last, start = places[-1]
        copies = self.copied(offset, start + last.nbytes)
        of_dtypes: dict[str, torch.Tensor] = {}
        for tensor, start in places:
            if tensor.dtype not in of_dtypes:
                of_dtypes[tensor.dtype] = of_dtype(copies, tensor.dtype, (-1,))
            whole = of_dtypes[tensor.dtype]
            yield tensor.name, view_at(whole, start // whole.element_size(), tensor.shape)

    def copied(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a copy of ``nbytes`` bytes from ``offset`` on, uint8, queued on the current stream. It is padded, so
        that it can be viewed in any dtype."""
        copies = self._memory.room(aligned(nbytes))
        if nbytes:
            self._memory.copy(offset, copies[:nbytes])
        return copies

    def close(self) -> None:
        """Unmap the memory; it must no longer be read."""
        self._memory.close()
        self._page.close()


MappedMemory: TypeAlias = _HostMemory | GpuMemory
"""A trainer's memory, mapped in this process: ``group_bytes`` are what one thread should convert at a time."""


class TrainerMemory:
    """The mapped memories of trainers, by name. ``hold`` and ``release`` are for one event loop; the others are
    thread-safe."""

    def __init__(self, registered: Registered | None = None) -> None:
        """``registered``: registers memory with the GPU that quantizes; None: there is none."""
        self._registered = registered
        self._opened: dict[str, tuple[MappedMemory, SharedMemorySource]] = {}
        self._lock, self._held = threading.Lock(), Counter[str]()

    async def hold(self, source: SharedMemorySource) -> MappedMemory:
        """Return the memory, which stays mapped until ``release``. Raises NotShared, with the reason."""
        self._held[source.memory] += 1  # before it is looked up: see ``prune``
        try:
            opened = self._opened.get(source.memory)
            return await asyncio.to_thread(self.open, source) if opened is None else opened[0]
        except BaseException:
            self.release(source)
            raise

    def release(self, source: SharedMemorySource) -> None:
        """End a ``hold``."""
        self._held -= Counter([source.memory])  # keeps no names at count 0

    def open(self, source: SharedMemorySource) -> MappedMemory:
        """Return the memory, mapping it if necessary. Raises NotShared, with the reason."""
        with self._lock:
            if source.memory not in self._opened:
                try:
                    opened = self._open(source)
                except OSError as error:
                    what = f"GPU {source.gpu}" if isinstance(source, CudaIpcSource) else "memory"
                    raise NotShared(
                        f"the trainer's {what} cannot be read here: {error}. Send the tensors in parts",
                        {"process": source.process},
                    ) from error
                self._opened[source.memory] = opened, source
            return self._opened[source.memory][0]

    def _open(self, source: SharedMemorySource) -> MappedMemory:
        if (here := machine()) != source.machine:
            raise OSError(f"the trainer runs on another machine ({source.machine}, and this is {here})")
        if not isinstance(source, CudaIpcSource):
            return _HostMemory(self._host_memory(source), self._registered)
        if self._registered is None:
            raise OSError("the ingest has no GPU: weights.ingest_num_gpus is 0")
        page = self._host_memory(source)
        try:
            return GpuMemory(page, OtherGpuMemory(source.handle, source.handle_bytes))
        except OSError:
            page.close()
            raise

    @staticmethod
    def _host_memory(source: SharedMemorySource) -> SharedMemory:
        return SharedMemory.open(source.process, source.descriptor, source.memory)

    @classmethod
    def is_there(cls, source: SharedMemorySource) -> bool:
        """Return True if the trainer still has the memory, or if that is unknown."""
        try:
            cls._host_memory(source).close()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # another user may have its process id now
            return False
        except OSError as error:
            logger.warning("whether process %d has its memory is not known: %s", source.process, error)
        return True

    def prune(self) -> None:
        """Unmap memory that its trainer has released, or whose trainer has ended, unless it is held."""
        with self._lock:
            for name, (memory, source) in list(self._opened.items()):
                if self.is_there(source):
                    continue
                del self._opened[name]
                if self._held[name]:  # looked at last, since ``hold`` takes no lock
                    self._opened[name] = memory, source
                else:
                    memory.close()

    def close(self) -> None:
        """Unmap all memory; it must no longer be read."""
        with self._lock:
            for memory, _ in self._opened.values():
                memory.close()
            self._opened = {}


def shared_buckets(announced: Sequence[UploadTensor], batch: SharedTensors, memory: MappedMemory) -> Iterator[Bucket]:
    """Yield the tensors of ``batch`` in buckets, each for one thread.

    ``announced``: all tensors of the version. Raises InvalidRequest for a tensor number that does not exist, or a range
    outside the memory.
    """
    tensors = tuple(announced[batch.first : batch.first + batch.count])
    if len(tensors) < batch.count:
        raise InvalidRequest(
            f"tensors {batch.first} to {batch.first + batch.count - 1} are said to lie in the memory, and "
            f"{len(announced)} were announced",
            {"first": batch.first, "count": batch.count, "announced": len(announced)},
        )
    places = list(placed(tensors, batch.offset))
    last, offset = places[-1]
    if batch.offset % SHARED_ALIGNMENT or offset + last.nbytes > memory.nbytes:
        raise InvalidRequest(
            f"{batch.count} tensors from {batch.offset} on end with {last.name}, which has {last.nbytes} bytes "
            f"from {offset} on: they begin at multiples of {SHARED_ALIGNMENT}, and the memory has {memory.nbytes}",
            {"tensor": last.name, "offset": offset, "memory_bytes": memory.nbytes},
        )
    first = nbytes = 0
    for end, (tensor, _) in enumerate(places, start=1):
        nbytes += tensor.nbytes
        if nbytes >= memory.group_bytes or end == len(places):
            yield _bucket(tensors[first:end], places[first][1], memory)
            first, nbytes = end, 0


def _bucket(tensors: tuple[UploadTensor, ...], offset: int, memory: MappedMemory) -> Bucket:
    """Return a bucket of adjacent tensors. ``offset``: of the first one in the memory."""
    names = [tensor.name for tensor in tensors]
    batch = GpuBatch(tensors, partial(memory.copied, offset)) if isinstance(memory, GpuMemory) else None
    return Bucket(names, lambda: memory.read(tensors, offset), batch, in_turns=batch is not None)
