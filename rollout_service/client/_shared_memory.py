"""Sends a version to an ingest on the trainer's own machine through memory that both share.

Tensors are copied into the memory batch by batch, and the ingest reads a batch while the next one is copied. Nothing
goes through sockets, and nothing is hashed on the way: it is memory. What is said: ``rollout_service.protocol.upload``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from rollout_service.client._http import Http
from rollout_service.client._retry import Repeat
from rollout_service.client._tensors import Progress, TensorThread
from rollout_service.errors import NotFound, NotShared
from rollout_service.protocol.upload import (
    SHARED_ALIGNMENT,
    Announcement,
    SharedMemorySource,
    SharedTensor,
    SharedTensors,
    UploadPlan,
    UploadTensor,
    with_kv_scales,
)
from rollout_service.shared_memory import SharedMemory, machine
from rollout_service.tasks import raise_first_failure

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("rollout_service.client")
BATCH_BYTES = 256 << 20
"""Of one batch, unless a tensor is larger."""
BATCHES = 4
"""One is copied while the others are read."""
_MOST_TENSORS = 10_000
"""Of one batch."""


LEAST_SHARED_BYTES = 256 << 20
"""A version that is smaller goes through sockets as fast."""


class SharedMemoryPushes:
    """Those of one client, which keeps the memory from one to the next."""

    def __init__(self, http: Http, begin: Callable[[Announcement], Awaitable[UploadPlan]]) -> None:
        """``begin``: announces a version."""
        self._http, self._begin = http, begin
        self._ring: SharedRing | None = None
        self._reached = True
        """Whether the ingest can read this process's memory, as far as it is known."""

    def is_worth_trying(self, table: tuple[UploadTensor, ...]) -> bool:
        """Whether to try it first for a version of these tensors."""
        return self._reached and sum(tensor.nbytes for tensor in table) >= LEAST_SHARED_BYTES

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
    ) -> tuple[int, str] | None:
        """Announce a version and send its tensors. Returns its number, and the digest of the whole upload.

        Args:
            announce: makes the announcement, given its source.
            otherwise: there is another way: None is returned if the ingest cannot reach the memory.
            again: the tensors can be read once more, from the first on: None is returned, too, if the service has
                dropped what it was sent.

        Raises NotShared, and what the service refuses tensors with.
        """
        try:
            if self._ring is None or self._ring.slot_bytes < slot_bytes(table):
                self.close()
                self._ring = SharedRing(slot_bytes(table))
            ring, source = self._ring, self._ring.source(table)
            announced = announce(source=source)
            plan = await self._begin(announced)
        except (NotShared, OSError) as error:
            self.close()
            self._reached = False
            if not otherwise:
                raise
            logger.info("weights go through sockets, not through shared memory: %s", error)
            return None
        try:
            total = sum(tensor.nbytes for tensor in table)
            await send_shared(self._http, ring, plan.version, source.transfer, tensors, total, thread, progress)
        except BaseException as error:
            self.close()  # the ingest may be reading what the next push would write
            if not isinstance(error, NotFound) or not again:
                raise
            logger.warning("the weights are sent again, in parts: %s", error)
            return None
        return plan.version, with_kv_scales(source.transfer, announced.kv_scales)

    def close(self) -> None:
        """Let go of the memory that is kept for the next push."""
        if self._ring is not None:
            self._ring.close()
        self._ring = None


class SharedRing:
    """Memory for ``BATCHES`` batches; kept for the next push, since its pages and its registration cost seconds."""

    def __init__(self, slot_bytes: int) -> None:
        """Raises OSError."""
        self.slot_bytes = slot_bytes
        self.memory = SharedMemory.create(BATCHES * slot_bytes)
        self._pinned = False

    def source(self, tensors: tuple[UploadTensor, ...]) -> SharedMemorySource:
        """For one push of these tensors. Raises OSError."""
        return SharedMemorySource(
            transfer=uuid.uuid4().hex,
            machine=machine(),
            process=os.getpid(),
            descriptor=self.memory.descriptor,
            memory=self.memory.name,
            tensors=tensors,
        )

    def pin(self) -> None:
        """Register it with CUDA, if this process uses CUDA: a GPU then writes there at the speed of PCIe."""
        import torch

        from rollout_service.pinning import pin_if_possible

        if torch.cuda.is_initialized() and not self._pinned:
            pin_if_possible(self.memory.view)
            self._pinned = True

    def fill(self, tensors: Iterator[tuple[str, torch.Tensor]], slot: int, held: Held) -> Batch:
        """Copy tensors into a slot until one does not fit, which is ``held`` for the next; empty: there are none left.

        What was queued on this thread's CUDA stream is done when this returns.
        """
        import torch

        start = slot * self.slot_bytes
        end = start + min(self.slot_bytes, BATCH_BYTES)
        placed: list[SharedTensor] = []
        nbytes, is_on_gpu = 0, False
        while (found := held.take() or next(tensors, None)) is not None:
            name, tensor = found
            # the first one fits in any case: a slot is as large as the largest tensor
            if placed and (start + tensor.nbytes > end or len(placed) == _MOST_TENSORS):
                held.keep(name, tensor)
                break
            if tensor.nbytes:
                target = torch.frombuffer(self.memory.view[start : start + tensor.nbytes], dtype=tensor.dtype)
                target.view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
            is_on_gpu = is_on_gpu or tensor.is_cuda
            placed.append(SharedTensor(name=name, offset=start))
            nbytes += tensor.nbytes
            start += _aligned(tensor.nbytes)
            del tensor, found
        if is_on_gpu:
            torch.cuda.current_stream().synchronize()
        return Batch(tuple(placed), nbytes)

    def close(self) -> None:
        """Give it up: the ingest sees that it is gone."""
        self.memory.close()


class Batch(NamedTuple):
    """Tensors that lie in a slot."""

    tensors: tuple[SharedTensor, ...]
    nbytes: int


class Held:
    """At most one tensor, taken from a source and not copied yet."""

    def __init__(self) -> None:
        self._tensor: tuple[str, torch.Tensor] | None = None

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Hold it."""
        self._tensor = name, tensor

    def take(self) -> tuple[str, torch.Tensor] | None:
        """It, if there is one; held no more."""
        taken, self._tensor = self._tensor, None
        return taken


def slot_bytes(tensors: Iterable[UploadTensor]) -> int:
    """Room for a batch, or for all of them if that is less."""
    sizes = [_aligned(tensor.nbytes) for tensor in tensors]
    return max(SHARED_ALIGNMENT, *sizes, min(BATCH_BYTES, sum(sizes)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SHARED_ALIGNMENT) * SHARED_ALIGNMENT


async def send_shared(
    http: Http,
    ring: SharedRing,
    version: int,
    transfer: str,
    tensors: Iterable[tuple[str, torch.Tensor]],
    total_bytes: int,
    thread: TensorThread,
    progress: Progress | None,
) -> None:
    """Send the tensors of a version that was announced with ``ring.source``; all have been read when this returns.

    Raises what the service refuses a batch with.
    """
    source, held, done_bytes = iter(tensors), Held(), 0
    free: asyncio.Queue[int] = asyncio.Queue()
    for slot in range(BATCHES):
        free.put_nowait(slot)

    async def send(number: int, batch: Batch, slot: int) -> None:
        nonlocal done_bytes
        body = SharedTensors(transfer=transfer, batch=number, tensors=batch.tensors).model_dump(mode="json")
        await http.send("POST", f"/v1/weights/{version}/shared", json=body, repeat=Repeat.IDEMPOTENT)
        done_bytes += batch.nbytes
        if progress is not None:
            progress(done_bytes, total_bytes)
        free.put_nowait(slot)

    await thread.call(ring.pin)
    async with raise_first_failure() as group:
        for number in range(1 << 62):
            slot = await free.get()
            batch = await thread.call(ring.fill, source, slot, held)
            if not batch.tensors:
                break
            group.create_task(send(number, batch, slot))
