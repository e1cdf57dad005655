"""Tensors in memory that a trainer on this machine shares, of the host or of a GPU; converted as they come.

Host memory is read in place. GPU memory is first copied, within the GPU or over NVLink, since torch accepts no address
of a GPU that this process does not see.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import torch

from rollout_service.errors import InvalidRequest, NotShared
from rollout_service.gpu.memory import OtherGpuMemory
from rollout_service.ingest.conversion import Bucket, GpuBatch
from rollout_service.ingest.sources.source import as_tensor, of_dtype
from rollout_service.ingest.staged_parts import coalesced
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

if TYPE_CHECKING:
    from rollout_service.ingest.batch_plan import BatchPlans

_MOST_MEMORIES = 16
"""Maximum number of mapped trainer memories."""
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
        self.executor: Executor | None = None
        self._memory = memory
        self._unregister: Callable[[], None] | None = None if registered is None else registered(memory.view)

    def read(self, places: Iterable[tuple[UploadTensor, int]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors at these offsets, as views of the memory. Finish using each one before requesting the next."""
        for tensor, offset in places:
            data = self._memory.view[offset : offset + tensor.nbytes]
            yield tensor.name, as_tensor(data, tensor.dtype, tensor.shape)

    def close(self) -> None:
        if self._unregister is not None:
            self._unregister()
        self._memory.close()


class GpuMemory:
    """A staging buffer in a trainer's GPU memory."""

    def __init__(self, page: SharedMemory, memory: OtherGpuMemory, executor: Executor | None) -> None:
        self.nbytes, self.group_bytes = memory.nbytes, GPU_BYTES
        self.executor = executor
        self._page, self._memory = page, memory

    def read(self, places: Iterable[tuple[UploadTensor, int]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors at these offsets, on the GPU. Finish using each one before requesting the next."""
        found = list(places)
        sizes = [aligned(tensor.nbytes) for tensor, _ in found]
        copies = self._memory.room(sum(sizes))
        starts = list(accumulate(sizes, initial=0))[:-1]
        wanted = ((offset, start, each.nbytes) for (each, offset), start in zip(found, starts, strict=True))
        for offset, start, nbytes in coalesced(wanted):
            self._memory.copy(offset, copies[start : start + nbytes])
        of_dtypes: dict[str, torch.Tensor] = {}
        for (tensor, _), start in zip(found, starts, strict=True):
            if tensor.dtype not in of_dtypes:
                of_dtypes[tensor.dtype] = of_dtype(copies, tensor.dtype, (-1,))
            whole = of_dtypes[tensor.dtype]
            yield tensor.name, view_at(whole, start // whole.element_size(), tensor.shape)

    def copied(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a copy of ``nbytes`` bytes from ``offset`` on, uint8, queued on the current stream."""
        copies = self._memory.room(nbytes)
        if nbytes:
            self._memory.copy(offset, copies)
        return copies

    def close(self) -> None:
        """Unmap the memory; it must no longer be read."""
        self._memory.close()
        self._page.close()


MappedMemory: TypeAlias = _HostMemory | GpuMemory
"""A trainer's memory, mapped in this process: ``group_bytes`` are what one thread should convert at a time, and
``executor`` converts it; None: the ingest's."""


class TrainerMemory:
    """The mapped memories of trainers, by name. Thread-safe."""

    def __init__(self, registered: Registered | None = None, gpu_executor: Executor | None = None) -> None:
        """
        Args:
            registered: registers memory with the GPU that quantizes; None: there is none.
            gpu_executor: converts tensors from GPU memory; None: the same executor as for all others.
        """
        self._registered, self._gpu_executor = registered, gpu_executor
        self._opened: dict[str, tuple[MappedMemory, SharedMemorySource]] = {}
        self._lock = threading.Lock()

    def opened(self, source: SharedMemorySource) -> MappedMemory | None:
        """Return the memory if it is already mapped. Does not block."""
        memory, _ = self._opened.get(source.memory, (None, None))
        return memory

    def open(self, source: SharedMemorySource) -> MappedMemory:
        """Return the memory, mapping it if necessary. Raises NotShared, with the reason."""
        with self._lock:
            if source.memory not in self._opened:
                try:
                    self._opened[source.memory] = self._open(source), source
                except OSError as error:
                    what = f"GPU {source.gpu}" if isinstance(source, CudaIpcSource) else "memory"
                    raise NotShared(
                        f"the trainer's {what} cannot be read here: {error}. Send the tensors in parts",
                        {"process": source.process},
                    ) from error
            return self._opened[source.memory][0]

    def _open(self, source: SharedMemorySource) -> MappedMemory:
        if (here := machine()) != source.machine:
            raise OSError(f"the trainer runs on another machine ({source.machine}, and this is {here})")
        if len(self._opened) >= _MOST_MEMORIES:
            raise OSError(f"the memories of {len(self._opened)} trainers are mapped already")
        if not isinstance(source, CudaIpcSource):
            return _HostMemory(self._host_memory(source), self._registered)
        if self._registered is None:
            raise OSError("the ingest has no GPU: weights.ingest_num_gpus is 0")
        page = self._host_memory(source)
        try:
            return GpuMemory(page, OtherGpuMemory(source.handle, source.handle_bytes), self._gpu_executor)
        except OSError:
            page.close()
            raise

    @staticmethod
    def _host_memory(source: SharedMemorySource) -> SharedMemory:
        return SharedMemory.open(source.process, source.descriptor, source.memory)

    @classmethod
    def is_there(cls, source: SharedMemorySource) -> bool:
        """Return True if the trainer still has the memory."""
        try:
            cls._host_memory(source).close()
        except OSError:
            return False
        return True

    def prune(self, used: Collection[str]) -> None:
        """Unmap memory that its trainer has released, or whose trainer has ended, except under the names ``used``."""
        with self._lock:
            for name, (memory, source) in list(self._opened.items()):
                if name not in used and not self.is_there(source):
                    del self._opened[name]
                    memory.close()

    def close(self) -> None:
        """Unmap all memory; it must no longer be read."""
        with self._lock:
            for memory, _ in self._opened.values():
                memory.close()
            self._opened = {}


class SharedBatch:
    """The tensors of one ``SharedTensors``."""

    def __init__(self, announced: Sequence[UploadTensor], batch: SharedTensors, memory: MappedMemory) -> None:
        """``announced``: all tensors of the version. Raises InvalidRequest for a tensor number that does not exist, or
        a range outside the memory."""
        self._memory, self._offset = memory, batch.offset
        self._tensors = tuple(announced[batch.first : batch.first + batch.count])
        if len(self._tensors) < batch.count:
            raise InvalidRequest(
                f"tensors {batch.first} to {batch.first + batch.count - 1} are said to lie in the memory, and "
                f"{len(announced)} were announced",
                {"first": batch.first, "count": batch.count, "announced": len(announced)},
            )
        *_, (last, offset) = placed(self._tensors, batch.offset)
        if batch.offset % SHARED_ALIGNMENT or offset + last.nbytes > memory.nbytes:
            raise InvalidRequest(
                f"{batch.count} tensors from {batch.offset} on end with {last.name}, which has {last.nbytes} bytes "
                f"from {offset} on: they begin at multiples of {SHARED_ALIGNMENT}, and the memory has {memory.nbytes}",
                {"tensor": last.name, "offset": offset, "memory_bytes": memory.nbytes},
            )

    def buckets(self, plans: "BatchPlans | None" = None) -> Iterator[Bucket]:
        """Yield buckets, each for one thread. ``plans``: for GPU memory; None: tensors are converted one by one."""
        first = nbytes = 0
        begins = self._offset
        for number, (tensor, offset) in enumerate(placed(self._tensors, self._offset)):
            if number == first:
                begins = offset
            nbytes += tensor.nbytes
            if nbytes >= self._memory.group_bytes or number == len(self._tensors) - 1:
                yield self._bucket(self._tensors[first : number + 1], begins, plans)
                first, nbytes = number + 1, 0

    def _bucket(self, tensors: tuple[UploadTensor, ...], offset: int, plans: "BatchPlans | None") -> Bucket:
        memory, batch = self._memory, None
        if plans is not None and isinstance(memory, GpuMemory):
            batch = GpuBatch(tensors, partial(memory.copied, offset), plans)
        names = [tensor.name for tensor in tensors]
        in_turns = memory.executor is not None
        return Bucket(names, lambda: memory.read(placed(tensors, offset)), batch, memory.executor, in_turns)
