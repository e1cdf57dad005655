"""Sends a version to an ingest on the trainer's own machine through memory that both share: the host's, or a GPU's.

Tensors are copied into the memory batch by batch, and the ingest reads a batch while the next one is copied. Nothing
goes through sockets, and nothing is hashed on the way: it is memory. What is said: ``rollout_service.protocol.upload``.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from rollout_service.client._http import Http
from rollout_service.client._retry import Repeat
from rollout_service.client._tensors import Progress, TensorThread
from rollout_service.errors import NotFound, NotShared
from rollout_service.gpu_memory import OwnGpuMemory
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
from rollout_service.ring import Ring, aligned
from rollout_service.shared_memory import SharedMemory, machine
from rollout_service.tasks import raise_first_failure

if TYPE_CHECKING:
    import torch

    from rollout_service.quant.verdicts import Verdicts

logger = logging.getLogger("rollout_service.client")
BATCH_BYTES = 256 << 20
"""Of one batch, unless a single tensor is larger."""
GPU_BATCH_BYTES = 384 << 20
"""Likewise in a GPU's memory, where a batch takes the ingest less time than to say that it is there."""
BATCHES = 4
"""That the memory holds, if not more: one is copied while the others are read."""
_MOST_TENSORS = 10_000
"""Of one batch."""


LEAST_SHARED_BYTES = 256 << 20
"""A version that is smaller goes through sockets as fast."""


class TrainersMemory(Protocol):
    """Memory of this process that an ingest can read, kept from one push to the next."""

    nbytes: int
    """How much there is."""
    may_be_mapped: bool
    """Whether an ingest may have it; False until it is announced."""

    @staticmethod
    def batch_bytes() -> int:
        """Of one batch, unless a single tensor is larger."""

    def source(self, tensors: tuple[UploadTensor, ...]) -> SharedMemorySource:
        """For one push of these tensors. Raises OSError."""

    def room(self, start: int, nbytes: int) -> torch.Tensor:
        """These bytes of it, uint8."""

    def close(self) -> None:
        """Give it up: the ingest sees that it is gone."""


class Listener(Protocol):
    """The ingest's own address."""

    async def post(self, route: str, json: object) -> bool:
        """Send JSON; False if it was not taken."""


class HostMemory:
    """The host's."""

    def __init__(self, nbytes: int) -> None:
        """Registered with CUDA, if this process uses CUDA: a GPU then writes there at the speed of PCIe.

        Raises OSError.
        """
        import torch

        from rollout_service.pinning import pin_if_possible

        self.nbytes, self.may_be_mapped = nbytes, False
        self._memory = SharedMemory.create(nbytes)
        if torch.cuda.is_initialized():
            pin_if_possible(self._memory.view)

    @staticmethod
    def batch_bytes() -> int:
        """See ``TrainersMemory``."""
        return BATCH_BYTES

    def source(self, tensors: tuple[UploadTensor, ...]) -> SharedMemorySource:
        """See ``TrainersMemory``."""
        return SharedMemorySource(tensors=tensors, **_named(self._memory))

    def room(self, start: int, nbytes: int) -> torch.Tensor:
        """See ``TrainersMemory``."""
        import torch

        return torch.frombuffer(self._memory.view, dtype=torch.uint8, count=nbytes, offset=start)

    def close(self) -> None:
        """See ``TrainersMemory``."""
        self._memory.close()


class GpuMemory:
    """The current GPU's, and a page of the host's by which the ingest knows whose it is, and that it is there."""

    _given_up: OwnGpuMemory | None = None
    """Memory that an ingest may have mapped still, for which CUDA promises nothing if it is freed. Of this process: the
    last one, so that pushes which fail do not fill the GPU."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError."""
        self.nbytes, self.may_be_mapped = nbytes, False
        self._memory = SharedMemory.create(1)
        try:
            self._on_gpu = OwnGpuMemory(nbytes)
        except OSError:
            self._memory.close()
            raise

    @staticmethod
    def batch_bytes() -> int:
        """See ``TrainersMemory``."""
        return GPU_BATCH_BYTES

    def source(self, tensors: tuple[UploadTensor, ...]) -> SharedMemorySource:
        """See ``TrainersMemory``."""
        gpu = self._on_gpu
        return CudaIpcSource(
            tensors=tensors, gpu=gpu.gpu, handle=gpu.handle, handle_bytes=gpu.nbytes, **_named(self._memory)
        )

    def room(self, start: int, nbytes: int) -> torch.Tensor:
        """See ``TrainersMemory``."""
        return self._on_gpu.tensor[start : start + nbytes]

    def close(self) -> None:
        """See ``TrainersMemory``."""
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
    """Those of one client through one kind of memory, which is kept from one to the next."""

    def __init__(
        self,
        http: Http,
        begin: Callable[[Announcement], Awaitable[UploadPlan]],
        listener: Callable[[UploadPlan], Awaitable[Listener | None]],
        kind: type[HostMemory] | type[GpuMemory],
    ) -> None:
        """``begin``: announces a version. ``listener``: what takes batches directly; None: they go through ``http``."""
        self._http, self._begin, self._listener, self._kind = http, begin, listener, kind
        self._memory: TrainersMemory | None = None
        self.reached = True
        """Whether the ingest can read this process's memory, as far as it is known."""

    def is_worth_trying(self, table: tuple[UploadTensor, ...]) -> bool:
        """Whether to try it first for a version of these tensors."""
        return self.reached and sum(tensor.nbytes for tensor in table) >= LEAST_SHARED_BYTES

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
        verdicts: Verdicts | None = None,
    ) -> tuple[int, str] | None:
        """Announce a version and send its tensors. Returns its number, and the digest of the whole upload.

        Args:
            announce: makes the announcement, given its source.
            tensors: those of ``table``, in its order. None is taken before the ingest has reached the memory.
            otherwise: there is another way: None is returned if the ingest cannot reach the memory.
            again: the tensors can be read once more, from the first on: None is returned, too, if the service has
                dropped what it was sent.
            verdicts: that ``tensors`` ask: those of a batch are required before the ingest is told of it.

        Raises NotShared, QuantizationError by ``verdicts``, and what the service refuses tensors with.
        """
        try:
            memory = await self._memory_for(table, thread)
            source = memory.source(table)
            announced = announce(source=source)
            plan = await self._announced(memory, announced)
        except (NotShared, OSError) as error:
            self.close()
            self.reached = False
            if not otherwise and not isinstance(error, NotShared):
                raise NotShared(f"there is no memory to share: {error}") from error
            if not otherwise:
                raise
            logger.info("weights do not go through memory of this kind: %s", error)
            return None
        try:
            listener = await self._listener(plan)
            post = functools.partial(_post, self._http, listener, f"/v1/weights/{plan.version}/shared")
            await send_shared(post, memory, source, tensors, thread, progress, verdicts)
        except BaseException as error:
            self.close()  # the ingest may be reading what the next push would write
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
            memory.may_be_mapped = before  # the ingest said that it has not mapped it
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
        """Let go of the memory that is kept for the next push."""
        if self._memory is not None:
            self._memory.close()
        self._memory = None


def memory_bytes(tensors: Iterable[UploadTensor], batch_bytes: int) -> int:
    """Room for ``BATCHES`` batches, or for the largest tensor and two batches; or for all of them if that is less.

    With the largest tensor alone there, the others would wait until it is read.
    """
    sizes = [aligned(max(tensor.nbytes, 1)) for tensor in tensors]
    room = max(BATCHES * aligned(batch_bytes), max(sizes, default=0) + 2 * aligned(batch_bytes))
    return max(min(room, sum(sizes)), 1)


def batches(tensors: Iterable[UploadTensor], batch_bytes: int) -> Iterator[list[UploadTensor]]:
    """All of them, in their order: up to ``batch_bytes`` each, or a single tensor."""
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
    verdicts: Verdicts | None,
) -> None:
    """Copy the next tensors, which are those of ``batch``, into the memory from ``start`` on, as ``placed`` says.

    The copies are done when this returns. Raises ValueError for another tensor, and what ``verdicts`` raise.
    """
    import torch

    from rollout_service.views import view_at  # needs torch

    of_dtypes: dict[torch.dtype, torch.Tensor] = {}
    """All of the memory: to make a view of it for each of thousands of tensors is one call, where slicing is three."""
    gpus: set[torch.device] = set()
    """Whose streams copy: of a model on several GPUs each tensor's own."""
    for entry, offset in placed(batch, start):
        name, tensor = next(tensors)
        if name != entry.name or tensor.nbytes != entry.nbytes:
            raise ValueError(f"{name} of {tensor.nbytes} bytes came, where the table has {entry.name}")
        if tensor.nbytes:
            if (whole := of_dtypes.get(tensor.dtype)) is None:
                usable = memory.nbytes // SHARED_ALIGNMENT * SHARED_ALIGNMENT
                whole = of_dtypes[tensor.dtype] = memory.room(0, usable).view(tensor.dtype)
            room = view_at(whole, offset // tensor.element_size(), entry.shape)
            # not of the host's pinned memory: a generator may fill it anew before the GPU has read it
            room.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                gpus.add(tensor.device)
            if room.is_cuda:
                gpus.add(room.device)
        del tensor  # before a generator makes the next
    require_sound = None if verdicts is None else verdicts.collect()
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()
    if require_sound is not None:
        require_sound()


async def _post(http: Http, listener: Listener | None, route: str, body: object) -> None:
    if listener is None or not await listener.post(route, body):
        await http.send("POST", route, json=body, repeat=Repeat.IDEMPOTENT)


async def send_shared(
    post: Callable[[object], Awaitable[object]],
    memory: TrainersMemory,
    source: SharedMemorySource,
    tensors: Iterable[tuple[str, torch.Tensor]],
    thread: TensorThread,
    progress: Progress | None,
    verdicts: Verdicts | None,
) -> None:
    """Send the tensors of a version that was announced with ``source``; all have been read when this returns.

    ``post``: sends JSON that says where tensors lie, and returns when they have been read.

    Raises what ``verdicts`` raise, and what the service refuses a batch with.
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
                await asyncio.wait([under_way.popleft()])  # what it raises cancels this, too
                ring.give_back(1)
            await thread.call(fill, memory, start, batch, coming, verdicts)
            body = SharedTensors(transfer=source.transfer, batch=number, first=first, count=len(batch), offset=start)
            first += len(batch)
            under_way.append(group.create_task(send(body, sum(tensor.nbytes for tensor in batch))))
        await thread.call(next, coming, None)  # a source that has more says so
