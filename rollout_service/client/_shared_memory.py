"""Send a version to an ingest on the same machine through shared memory, of the host or of a GPU.

Tensors are copied into the memory batch by batch; the ingest reads one batch while the next is copied. The data is
neither sent through sockets nor hashed. ``rollout_service.protocol.upload`` describes the messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rollout_service.client._http import Http, Repeat
from rollout_service.client._push import Push, staged_still
from rollout_service.client._tensors import TensorThread
from rollout_service.errors import NotFound, NotShared, QuantizationError
from rollout_service.gpu.memory import OwnGpuMemory
from rollout_service.protocol.ring import Ring, aligned
from rollout_service.protocol.upload import (
    SHARED_ALIGNMENT,
    Announcement,
    CudaIpcSource,
    SharedMemorySource,
    SharedTensors,
    UploadPlan,
    UploadTensor,
    placed,
    with_kv_scales,
)
from rollout_service.runtime.groups import groups_of
from rollout_service.runtime.shared_memory import SharedMemory, machine
from rollout_service.runtime.tasks import raise_first_failure

if TYPE_CHECKING:
    import torch

    from rollout_service.client._part_sender import DirectListener
    from rollout_service.quant.deferred_checks import DeferredChecks

logger = logging.getLogger("rollout_service.client")
BATCH_BYTES = 256 << 20
"""Maximum size of a batch in host memory in bytes. A single larger tensor forms its own batch."""
GPU_BATCH_BYTES = 384 << 20
"""Maximum size of a batch in GPU memory, where reading a batch takes less time than announcing it."""
BATCHES = 4
"""Minimum number of batches that the memory holds: one is copied while the others are read."""
_MOST_TENSORS = 10_000
"""Maximum number of tensors in a batch."""


MIN_SHARED_BYTES = 256 << 20
"""Minimum size of a version that uses shared memory. Sockets are as fast for a smaller one."""
RETRY_S = 600.0
"""Time in seconds after which ``auto`` tries a kind of memory again that could not be shared."""


class HostMemory:
    """Shared memory of the host, which an ingest can read."""

    def __init__(self, nbytes: int) -> None:
        """Allocate the memory. It is pinned if this process uses CUDA, so that a GPU writes to it at PCIe speed.

        Raises OSError.
        """
        import torch

        from rollout_service.gpu.pinning import pin_if_possible

        self.nbytes = nbytes
        self.may_be_mapped = False
        """True if an ingest may have mapped the memory; False until it is announced."""
        self._memory = SharedMemory.create(nbytes)
        self._unpin: Callable[[], object] = lambda: None
        if torch.cuda.is_initialized():
            self._unpin = finalizer = weakref.finalize(self, pin_if_possible(self._memory.view))
            finalizer.atexit = False

    @staticmethod
    def batch_bytes() -> int:
        """Return the maximum size of a batch in bytes. A single larger tensor forms its own batch."""
        return BATCH_BYTES

    def source(self, tensors: tuple[UploadTensor, ...]) -> SharedMemorySource:
        """Return the announcement for one push of these tensors. Raises OSError."""
        return SharedMemorySource(tensors=tensors, **_named(self._memory))

    def room(self, start: int, nbytes: int) -> torch.Tensor:
        """Return a view of these bytes of the memory, uint8."""
        import torch

        return torch.frombuffer(self._memory.view, dtype=torch.uint8, count=nbytes, offset=start)

    def close(self) -> None:
        """Release the memory. The ingest can detect the release."""
        self._unpin()
        self._memory.close()


class GpuMemory:
    """Memory of the current GPU. A page of host memory identifies its process to the ingest and shows that it still
    exists."""

    _given_up: OwnGpuMemory | None = None
    """The last released memory of this process. CUDA leaves freeing undefined while an ingest may have it mapped.
    Keeping only the last one prevents failed pushes from filling the GPU."""

    def __init__(self, nbytes: int) -> None:
        """Allocate the memory. Raises OSError."""
        self.nbytes, self.may_be_mapped = nbytes, False
        self._memory = SharedMemory.create(1)
        self._on_gpu = OwnGpuMemory(nbytes)
        self._unused = weakref.finalize(self, self._on_gpu.free)  # a cancelled push drops it
        self._unused.atexit = False

    @staticmethod
    def batch_bytes() -> int:
        """Return the maximum size of a batch in bytes, as ``HostMemory``."""
        return GPU_BATCH_BYTES

    def source(self, tensors: tuple[UploadTensor, ...]) -> SharedMemorySource:
        """Return the announcement for one push of these tensors. Raises OSError."""
        gpu = self._on_gpu
        self._unused.detach()  # an ingest may soon have it mapped
        return CudaIpcSource(
            tensors=tensors, gpu=gpu.gpu, handle=gpu.handle, handle_bytes=gpu.nbytes, **_named(self._memory)
        )

    def room(self, start: int, nbytes: int) -> torch.Tensor:
        """Return a view of these bytes of the memory, uint8."""
        return self._on_gpu.tensor[start : start + nbytes]

    def close(self) -> None:
        """Release the memory. If an ingest may have it mapped, freeing is delayed until the next release."""
        self._memory.close()
        if not self.may_be_mapped:
            self._on_gpu.free()
            return
        before, GpuMemory._given_up = GpuMemory._given_up, self._on_gpu
        if before is not None and before is not self._on_gpu:
            before.free()


def _named(memory: SharedMemory) -> dict[str, Any]:
    return {
        "transfer": uuid.uuid4().hex,
        "machine": machine(),
        "process": os.getpid(),
        "descriptor": memory.descriptor,
        "memory": memory.name,
    }


class SharedMemoryPushes:
    """The pushes of one client through one kind of memory, which is kept between pushes."""

    def __init__(
        self,
        http: Http,
        begin: Callable[[Announcement], Awaitable[UploadPlan]],
        listener: Callable[[UploadPlan], Awaitable[DirectListener | None]],
        kind: type[HostMemory] | type[GpuMemory],
    ) -> None:
        """Prepare pushes. ``begin`` announces a version. ``listener`` returns the direct listener, or None to use
        ``http``."""
        self._http, self._begin, self._listener, self._kind = http, begin, listener, kind
        self._memory: HostMemory | GpuMemory | None = None
        self._turn = asyncio.Lock()  # a second push would overwrite batches that the ingest has not read yet
        self._retry_at = 0.0

    @property
    def reached(self) -> bool:
        """Return False if the ingest lately did not reach this process's memory, or there was none to share."""
        return time.monotonic() >= self._retry_at

    def is_worth_trying(self, table: tuple[UploadTensor, ...]) -> bool:
        """Return True if a version of these tensors should try this kind of memory first."""
        return self.reached and sum(tensor.nbytes for tensor in table) >= MIN_SHARED_BYTES

    async def push(
        self,
        push: Push,
        table: tuple[UploadTensor, ...],
        tensors: Iterable[tuple[str, torch.Tensor]],
        checks: DeferredChecks | None,
    ) -> tuple[int, str] | None:
        """Announce a version and send ``tensors``, which ``table`` describes. None is read before the ingest has opened
        the memory. Pushes through one memory run one after the other.

        Returns the version number and the digest of the whole upload. With ``auto``, returns None if the ingest cannot
        open the memory, or has dropped the sent batches and the source can be read again.

        Raises NotShared, QuantizationError by ``checks``, and the service's error if it refuses the tensors.
        """
        may_differ = push.transport == "auto"
        async with self._turn:
            try:
                memory = await self._memory_for(table, push.thread)
                source = memory.source(table)
                announced = push.announce(source=source)
                plan = await self._announced(memory, announced)
            except (NotShared, OSError) as error:
                self.close()
                self._retry_at = time.monotonic() + RETRY_S
                if not may_differ and not isinstance(error, NotShared):
                    raise NotShared(f"there is no memory to share: {error}") from error
                if not may_differ:
                    raise
                logger.info("weights do not go through memory of this kind for %g s: %s", RETRY_S, error)
                return None
            try:
                await self._send(push, plan, memory, source, tensors, checks)
            except BaseException as error:
                self.close()  # the ingest may still be reading memory that the next push would overwrite
                if isinstance(error, QuantizationError):
                    raise staged_still(plan.version, error) from error
                if not isinstance(error, NotFound) or not may_differ or not push.source.can_be_read_again:
                    raise
                logger.warning("the weights are sent again, in parts: %s", error)
                return None
            return plan.version, with_kv_scales(source.transfer, announced.kv_scales)

    async def _announced(self, memory: HostMemory | GpuMemory, announced: Announcement) -> UploadPlan:
        before, memory.may_be_mapped = memory.may_be_mapped, True
        try:
            return await self._begin(announced)
        except NotShared:
            memory.may_be_mapped = before  # the ingest replied that it has not mapped the memory
            raise

    async def _memory_for(self, table: tuple[UploadTensor, ...], thread: TensorThread) -> HostMemory | GpuMemory:
        needed = memory_bytes(table, self._kind.batch_bytes())
        if self._memory is not None and self._memory.nbytes >= needed:
            return self._memory
        self.close()
        memory: HostMemory | GpuMemory = await thread.call(self._kind, needed)
        self._memory = memory
        return memory

    async def _send(
        self,
        push: Push,
        plan: UploadPlan,
        memory: HostMemory | GpuMemory,
        source: SharedMemorySource,
        tensors: Iterable[tuple[str, torch.Tensor]],
        checks: DeferredChecks | None,
    ) -> None:
        """Send the tensors of ``source``, which is announced. The ingest has read all of them when this returns."""
        listener, route = await self._listener(plan), f"/v1/weights/{plan.version}/shared"
        coming, done_bytes, first = iter(tensors), 0, 0
        total_bytes = sum(tensor.nbytes for tensor in source.tensors)
        ring, under_way = Ring(memory.nbytes), deque[asyncio.Task[None]]()

        async def tell(batch: SharedTensors, nbytes: int) -> None:
            """Return when the ingest has read the batch."""
            nonlocal done_bytes
            body = batch.model_dump(mode="json")
            if listener is None or not await listener.post(route, body):
                await self._http.send("POST", route, json=body, repeat=Repeat.IDEMPOTENT)
            done_bytes += nbytes
            if push.progress is not None:
                push.progress(done_bytes, total_bytes)

        async with raise_first_failure() as group:
            for number, batch in enumerate(batches(source.tensors, memory.batch_bytes())):
                while (start := ring.take(sum(map(_room_of, batch)))) is None:
                    await asyncio.wait([under_way.popleft()])  # its exception cancels this function, too
                    ring.give_back(1)
                await push.thread.call(fill, memory, start, batch, coming, checks)
                told = SharedTensors(
                    transfer=source.transfer, batch=number, first=first, count=len(batch), offset=start
                )
                first += len(batch)
                under_way.append(group.create_task(tell(told, sum(tensor.nbytes for tensor in batch))))
            await push.thread.call(next, coming, None)  # raises if the source has more tensors

    def close(self) -> None:
        """Release the memory that is kept for the next push."""
        if self._memory is not None:
            self._memory.close()
        self._memory = None


def memory_bytes(tensors: Iterable[UploadTensor], batch_bytes: int) -> int:
    """Return the size in bytes for ``BATCHES`` batches, or for the largest tensor and two batches, at most for all
    tensors.

    The two extra batches let other tensors be copied while the largest one is read.
    """
    sizes = list(map(_room_of, tensors))
    room = max(BATCHES * aligned(batch_bytes), max(sizes, default=0) + 2 * aligned(batch_bytes))
    return max(min(room, sum(sizes)), 1)


def batches(tensors: Iterable[UploadTensor], batch_bytes: int) -> Iterator[list[UploadTensor]]:
    """Return all tensors in order, in batches of up to ``batch_bytes`` bytes, or of a single larger tensor."""
    return groups_of(tensors, _room_of, batch_bytes, _MOST_TENSORS)


def _room_of(tensor: UploadTensor) -> int:
    """Return the bytes that a tensor takes of the memory, where no two tensors begin at one place."""
    return aligned(max(tensor.nbytes, 1))


def fill(
    memory: HostMemory | GpuMemory,
    start: int,
    batch: list[UploadTensor],
    tensors: Iterator[tuple[str, torch.Tensor]],
    checks: DeferredChecks | None,
) -> None:
    """Copy the tensors of ``batch`` into the memory from offset ``start`` on, laid out as in ``placed``.

    The copies are complete when this returns. Raises ValueError for an unexpected tensor, and the errors of
    ``checks``.
    """
    import torch

    from rollout_service.runtime.views import view_at  # imports torch

    of_dtypes: dict[torch.dtype, torch.Tensor] = {}
    """A view of the whole memory for each dtype. ``view_at`` then takes one call per tensor, where slicing takes
    three."""
    gpus: set[torch.device] = set()
    """The GPUs whose streams copy. A model on several GPUs uses the stream of each tensor's GPU."""
    for entry, offset in placed(batch, start):
        name, tensor = next(tensors)
        if name != entry.name or tensor.nbytes != entry.nbytes:
            raise ValueError(f"{name} of {tensor.nbytes} bytes came, where the table has {entry.name}")
        if tensor.nbytes:
            if (whole := of_dtypes.get(tensor.dtype)) is None:
                usable = memory.nbytes // SHARED_ALIGNMENT * SHARED_ALIGNMENT
                whole = of_dtypes[tensor.dtype] = memory.room(0, usable).view(tensor.dtype)
            room = view_at(whole, offset // tensor.element_size(), entry.shape)
            # blocking for pinned host memory: a generator may refill it before the GPU has read it
            room.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                gpus.add(tensor.device)
            if room.is_cuda:
                gpus.add(room.device)
        del tensor  # freed before a generator makes the next tensor
    require_sound = None if checks is None else checks.collect()
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()
    if require_sound is not None:
        require_sound()
