"""Send a version to an ingest on the same machine through shared memory, of the host or of a GPU.

Tensors are copied into the memory batch by batch; the ingest reads one batch while the next is copied. The data is
neither sent through sockets nor hashed. ``rollout_service.protocol.upload`` describes the messages.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
import uuid
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from rollout_service.client._http import Http
from rollout_service.client._retry import Repeat
from rollout_service.client._tensors import Progress, TensorThread
from rollout_service.errors import NotFound, NotShared
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


class TrainersMemory(Protocol):
    """Memory of this process that an ingest can read. It is kept between pushes."""

    nbytes: int
    """Size in bytes."""
    may_be_mapped: bool
    """True if an ingest may have mapped the memory; False until it is announced."""

    @staticmethod
    def batch_bytes() -> int:
        """Return the maximum size of a batch in bytes. A single larger tensor forms its own batch."""

    def source(self, tensors: tuple[UploadTensor, ...]) -> SharedMemorySource:
        """Return the announcement for one push of these tensors. Raises OSError."""

    def room(self, start: int, nbytes: int) -> torch.Tensor:
        """Return a view of these bytes of the memory, uint8."""

    def close(self) -> None:
        """Release the memory. The ingest can detect the release."""


class HostMemory:
    """Shared memory of the host."""

    def __init__(self, nbytes: int) -> None:
        """Allocate the memory. It is pinned if this process uses CUDA, so that a GPU writes to it at PCIe speed.

        Raises OSError.
        """
        import torch

        from rollout_service.gpu.pinning import pin_if_possible

        self.nbytes, self.may_be_mapped = nbytes, False
        self._memory = SharedMemory.create(nbytes)
        self._unpin: Callable[[], object] = lambda: None
        if torch.cuda.is_initialized():
            self._unpin = finalizer = weakref.finalize(self, pin_if_possible(self._memory.view))
            finalizer.atexit = False

    @staticmethod
    def batch_bytes() -> int:
        """Return ``BATCH_BYTES``."""
        return BATCH_BYTES

    def source(self, tensors: tuple[UploadTensor, ...]) -> SharedMemorySource:
        """Return the announcement for one push, see ``TrainersMemory``."""
        return SharedMemorySource(tensors=tensors, **_named(self._memory))

    def room(self, start: int, nbytes: int) -> torch.Tensor:
        """Return a view of the memory, see ``TrainersMemory``."""
        import torch

        return torch.frombuffer(self._memory.view, dtype=torch.uint8, count=nbytes, offset=start)

    def close(self) -> None:
        """Release the memory."""
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
        try:
            self._on_gpu = OwnGpuMemory(nbytes)
        except OSError:
            self._memory.close()
            raise

    @staticmethod
    def batch_bytes() -> int:
        """Return ``GPU_BATCH_BYTES``."""
        return GPU_BATCH_BYTES

    def source(self, tensors: tuple[UploadTensor, ...]) -> SharedMemorySource:
        """Return the announcement for one push, see ``TrainersMemory``."""
        gpu = self._on_gpu
        return CudaIpcSource(
            tensors=tensors, gpu=gpu.gpu, handle=gpu.handle, handle_bytes=gpu.nbytes, **_named(self._memory)
        )

    def room(self, start: int, nbytes: int) -> torch.Tensor:
        """Return a view of the memory, see ``TrainersMemory``."""
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
        self._memory: TrainersMemory | None = None
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
        announce: Callable[..., Announcement],
        table: tuple[UploadTensor, ...],
        tensors: Iterable[tuple[str, torch.Tensor]],
        thread: TensorThread,
        progress: Progress | None,
        *,
        otherwise: bool,
        again: bool,
        checks: DeferredChecks | None = None,
    ) -> tuple[int, str] | None:
        """Announce a version and send its tensors. Returns the version number and the digest of the whole upload.

        Raises NotShared, QuantizationError by ``checks``, and the service's error if it refuses the tensors.

        Args:
            announce: builds the announcement from its source.
            table: the table of the tensors.
            tensors: the tensors of ``table``, in order. None is read before the ingest has opened the memory.
            thread: the thread that copies.
            progress: see ``RolloutClient.push_weights``.
            otherwise: True if another transport can be used. Returns None if the ingest cannot open the memory.
            again: True if the tensors can be read again. Returns None, too, if the service has dropped the sent
                batches.
            checks: deferred checks of ``tensors``. Those of a batch are required before the ingest is told of it.
        """
        try:
            memory = await self._memory_for(table, thread)
            source = memory.source(table)
            announced = announce(source=source)
            plan = await self._announced(memory, announced)
        except (NotShared, OSError) as error:
            self.close()
            self._retry_at = time.monotonic() + RETRY_S
            if not otherwise and not isinstance(error, NotShared):
                raise NotShared(f"there is no memory to share: {error}") from error
            if not otherwise:
                raise
            logger.info("weights do not go through memory of this kind for %g s: %s", RETRY_S, error)
            return None
        try:
            listener = await self._listener(plan)
            post = functools.partial(_post, self._http, listener, f"/v1/weights/{plan.version}/shared")
            await send_shared(post, memory, source, tensors, thread, progress, checks)
        except BaseException as error:
            self.close()  # the ingest may still be reading memory that the next push would overwrite
            if not isinstance(error, NotFound) or not again:
                raise
            logger.warning("the weights are sent again, in parts: %s", error)
            return None
        return plan.version, with_kv_scales(source.transfer, announced.kv_scales)

    async def _announced(self, memory: TrainersMemory, announced: Announcement) -> UploadPlan:
        before, memory.may_be_mapped = memory.may_be_mapped, True
        try:
            return await self._begin(announced)
        except NotShared:
            memory.may_be_mapped = before  # the ingest replied that it has not mapped the memory
            raise

    async def _memory_for(self, table: tuple[UploadTensor, ...], thread: TensorThread) -> TrainersMemory:
        needed = memory_bytes(table, self._kind.batch_bytes())
        if self._memory is not None and self._memory.nbytes >= needed:
            return self._memory
        self.close()
        memory: TrainersMemory = await thread.call(self._kind, needed)
        self._memory = memory
        return memory

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
    sizes = [aligned(max(tensor.nbytes, 1)) for tensor in tensors]
    room = max(BATCHES * aligned(batch_bytes), max(sizes, default=0) + 2 * aligned(batch_bytes))
    return max(min(room, sum(sizes)), 1)


def batches(tensors: Iterable[UploadTensor], batch_bytes: int) -> Iterator[list[UploadTensor]]:
    """Yield all tensors in order, in batches of up to ``batch_bytes`` bytes, or of a single larger tensor."""
    batch: list[UploadTensor] = []
    nbytes = 0
    for tensor in tensors:
        size = aligned(max(tensor.nbytes, 1))
        if batch and (nbytes + size > batch_bytes or len(batch) == _MOST_TENSORS):
            yield batch
            batch, nbytes = [], 0
        batch.append(tensor)
        nbytes += size
    if batch:
        yield batch


def fill(
    memory: TrainersMemory,
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


async def _post(http: Http, listener: DirectListener | None, route: str, body: object) -> None:
    if listener is None or not await listener.post(route, body):
        await http.send("POST", route, json=body, repeat=Repeat.IDEMPOTENT)


async def send_shared(
    post: Callable[[object], Awaitable[object]],
    memory: TrainersMemory,
    source: SharedMemorySource,
    tensors: Iterable[tuple[str, torch.Tensor]],
    thread: TensorThread,
    progress: Progress | None,
    checks: DeferredChecks | None,
) -> None:
    """Send the tensors of a version announced with ``source``. The ingest has read all of them when this returns.

    Raises the errors of ``checks``, and the service's error if it refuses a batch.

    Args:
        post: sends JSON with the offsets of a batch, and returns when the ingest has read the batch.
        memory: the shared memory.
        source: the announced source.
        tensors: the tensors of ``source``, in order.
        thread: the thread that copies.
        progress: see ``RolloutClient.push_weights``.
        checks: deferred checks of ``tensors``.
    """
    coming, done_bytes = iter(tensors), 0
    total_bytes = sum(tensor.nbytes for tensor in source.tensors)
    ring, under_way = Ring(memory.nbytes), deque[asyncio.Task[None]]()

    async def send(body: SharedTensors, nbytes: int) -> None:
        nonlocal done_bytes
        await post(body.model_dump(mode="json"))
        done_bytes += nbytes
        if progress is not None:
            progress(done_bytes, total_bytes)

    first = 0
    async with raise_first_failure() as group:
        for number, batch in enumerate(batches(source.tensors, memory.batch_bytes())):
            while (start := ring.take(sum(aligned(max(tensor.nbytes, 1)) for tensor in batch))) is None:
                await asyncio.wait([under_way.popleft()])  # its exception cancels this function, too
                ring.give_back(1)
            await thread.call(fill, memory, start, batch, coming, checks)
            body = SharedTensors(transfer=source.transfer, batch=number, first=first, count=len(batch), offset=start)
            first += len(batch)
            under_way.append(group.create_task(send(body, sum(tensor.nbytes for tensor in batch))))
        await thread.call(next, coming, None)  # raises if the source has more tensors
