"""Background conversion of one version: read buckets of tensors, quantize them, and write them to the version's files.

Every source of weights delivers buckets, and one thread converts each.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from rollout_service.errors import InvalidManifest, RolloutServiceError
from rollout_service.gpu.streams import own_stream_done
from rollout_service.ingest.batched_store import BatchedStore
from rollout_service.metrics.process import count_converted, counted_conversion
from rollout_service.model.convert import Named, tensor_bytes
from rollout_service.protocol.upload import UploadTensor
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.store.manifest import StoredTensor
from rollout_service.store.writer import VersionWriter

if TYPE_CHECKING:
    from rollout_service.ingest.batch_plan import BatchPlan, BatchPlans

GPU = torch.device("cuda", 0)
"""The GPU with which a log's memory is registered, if there is one."""

FAILURES = (RolloutServiceError, OSError, RuntimeError)
"""Errors that reading, converting and writing raise. torch raises RuntimeError, for example if a GPU is out of
memory."""


class GpuBatch(NamedTuple):
    """The tensors of a bucket that a GPU can copy at once."""

    tensors: tuple[UploadTensor, ...]
    copied: Callable[[int], torch.Tensor]
    """Returns a copy, uint8 on the GPU, of at least the given size, laid out as in ``placed``. It is queued on the
    current stream."""


class Bucket(NamedTuple):
    """Tensors that are converted together."""

    names: Sequence[str]
    read: Callable[[], Iterable[Named]]
    """Yields the tensors, one after the other. Called from a thread."""
    batch: GpuBatch | None = None
    """Converted by the few threads for GPU memory, with a plan if there is one. None: by the others, one by one."""
    in_turns: bool = False
    """True if its threads take turns, except while they wait for a GPU."""


class TiedHead(NamedTuple):
    """Names of two tensors with the same weights."""

    head: str
    embedding: str


class Conversion:
    """Converts one version. Lives in the ingest's event loop; the conversions run in the threads of ``executor``."""

    def __init__(
        self,
        version: int,
        writer: VersionWriter,
        convert: Callable[..., Iterator[Named]],
        executor: Executor,
        gpu_executor: Executor | None = None,
    ) -> None:
        """
        Args:
            convert: ``Converter.convert``, or an equivalent for tensors that come as they are stored.
            gpu_executor: converts buckets with a ``batch``; None: ``executor`` does.
        """
        self.version = version
        self._writer, self._converts = writer, convert
        self._executor, self._gpu_executor = executor, gpu_executor or executor
        self._tasks: dict[int | None, list[Future[None]]] = defaultdict(list)
        self._failed: dict[int | None, RolloutServiceError] = {}
        """Errors by the keys of their buckets; None: the version is lost."""
        self._noting = threading.Lock()
        self._read: dict[str, int] = {}
        self.quantize_s = self.store_s = 0.0
        """Time of all threads together, in seconds, for converting tensors and for storing them."""
        self._stored: tuple[StoredTensor, ...] | None = None
        self._turn = threading.Lock()
        """Lock for threads that only launch kernels and wait: see ``BatchedStore``."""
        self.gpu = GPU if writer.are_slots_registered else None
        """The GPU with which the log's memory is registered. Each thread reads tensors in its own stream there."""
        self.plans: BatchPlans | None = None
        """Plans for ``gpu``; None: every tensor is converted by itself."""

    @property
    def failure(self) -> RolloutServiceError | None:
        """Return the error of the first failed conversion: this version is lost and must begin anew.

        A failure is cleared if the part that it came from is replaced.
        """
        return next(iter(list(self._failed.values())), None)

    @property
    def read_bytes(self) -> int:
        """Return the size in bytes of all tensors read so far, as received."""
        return sum(list(self._read.values()))

    def begin(self, bucket: Bucket, key: int | None = None) -> Future[None]:
        """Convert a bucket. The future is done, or cancelled, once its tensors are no longer read; it never raises.

        ``key``: a failure holds until ``forget`` is called with this key. None: a failure ends the version.
        """
        executor = self._executor if bucket.batch is None else self._gpu_executor
        task = executor.submit(self._convert, bucket, key)
        self._tasks[key].append(task)
        return task

    async def forget(self, keys: Collection[int]) -> None:
        """Wait until the buckets of these keys are no longer read, and forget their failures: they are begun again."""
        for key in keys:  # those that run stay known to ``stop``
            self._tasks[key] = [task for task in self._tasks[key] if not task.cancel()]
        await asyncio.gather(*(asyncio.wrap_future(task) for key in keys for task in self._tasks[key]))
        with self._noting:
            for key in keys:
                self._failed.pop(key, None)

    async def finish(
        self, *, tied: TiedHead | None = None, check: Callable[[Iterable[StoredTensor]], None] | None = None
    ) -> tuple[StoredTensor, ...]:
        """Wait until all tensors are converted, and sync the files. May be called again.

        Args:
            tied: these two are the same, and the head need not have been sent.
            check: raises RolloutServiceError for tensors that differ from the announcement.

        Raises the error of the first failed conversion.
        """
        await asyncio.gather(*map(asyncio.wrap_future, chain.from_iterable(self._tasks.values())))
        if self._stored is None and self.failure is None:
            loop = asyncio.get_running_loop()
            self._stored = await loop.run_in_executor(self._executor, self._finish, tied, check)
        if (failure := self.failure) is not None:
            raise failure
        assert self._stored is not None
        return self._stored

    async def stop(self) -> None:
        """Stop converting, and close the files."""
        await asyncio.gather(*map(asyncio.wrap_future, self._running()), return_exceptions=True)
        self._writer.close()

    def stop_and_wait(self) -> None:
        """Do the same without an event loop."""
        wait(self._running())
        self._writer.close()

    def _running(self) -> list[Future[None]]:
        """Cancel what waits. Return what runs: it cannot be cancelled, and must not write once its file is closed."""
        return [task for task in chain.from_iterable(self._tasks.values()) if not task.cancel()]

    def _convert(self, bucket: Bucket, key: int | None) -> None:
        if None in self._failed:
            return
        try:
            batch = bucket.batch
            plan = None if batch is None or self.plans is None else self.plans.of(batch.tensors)
            if batch is None or plan is None:
                self._write(bucket.read, self._turn if bucket.in_turns else threading.Lock())
            else:
                self._write_planned(batch, plan)
        except FAILURES as error:
            self._note_failure(key, error)

    def _write_planned(self, batch: GpuBatch, plan: "BatchPlan") -> None:
        assert self.gpu is not None
        began = time.perf_counter()
        queued_s = plan.store(batch.copied, self._writer, self.gpu, self._turn)
        took_s = time.perf_counter() - began
        count_converted(sum(plan.read_bytes.values()), took_s)
        with self._noting:
            self._read |= plan.read_bytes
            self.quantize_s += queued_s
            self.store_s += took_s - queued_s

    def _write(self, read: Callable[[], Iterable[Named]], turn: threading.Lock) -> None:
        began = time.perf_counter()
        tensors = read()  # a delta's are decoded here
        read_s = time.perf_counter() - began
        tensors = self._noted(tensors)
        gpu = self.gpu
        checks = DeferredChecks() if self._writer.has_slots else None
        convert = partial(self._converts, to_cpu=checks is None, checks=checks)
        with (
            nullcontext() if gpu is None else own_stream_done(gpu),
            nullcontext() if checks is None else BatchedStore(self._writer, gpu, checks, turn) as store,
        ):
            began, store_s = time.perf_counter(), 0.0
            for name, tensor in counted_conversion(convert, tensors):
                converted = time.perf_counter()
                if store is not None:
                    store.fill(name, tensor)
                else:
                    self._writer.write(name, tensor_bytes(tensor))
                store_s += time.perf_counter() - converted
            converted = time.perf_counter()
        ended = time.perf_counter()
        store_s += ended - converted
        with self._noting:
            self.quantize_s += read_s + ended - began - store_s
            self.store_s += store_s

    def _noted(self, tensors: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in tensors:
            self._read[name] = tensor.nbytes
            yield name, tensor
            del tensor  # free it before the next is read

    def _finish(
        self, tied: TiedHead | None, check: Callable[[Iterable[StoredTensor]], None] | None
    ) -> tuple[StoredTensor, ...]:
        try:
            if tied is not None and tied.head in self._writer.unwritten:
                # a CPU engine holds a packed copy of the head, which it rebuilds only when a head is loaded
                self._write(lambda: [(tied.head, self._read_back(tied.embedding))], self._turn)
            tensors = self._writer.finish()
            if check is not None:
                check(tensors)
            if tied is not None:
                _require_equal_heads(tensors, tied)
        except FAILURES as error:
            self._note_failure(None, error)
            return ()
        return tensors

    def _read_back(self, name: str) -> torch.Tensor:
        place = self._writer.place(name)
        stored = torch.frombuffer(self._writer.read(name), dtype=getattr(torch, place.dtype))
        return stored.view(place.shape)

    def _note_failure(self, key: int | None, error: Exception) -> None:
        if not isinstance(error, RolloutServiceError):
            error = RolloutServiceError(f"version {self.version} could not be stored: {error}")
        with self._noting:
            self._failed.setdefault(key, error)


def _require_equal_heads(tensors: tuple[StoredTensor, ...], tied: TiedHead) -> None:
    # vLLM on a GPU drops the head of a tied model, so different weights in it would be lost silently
    digests = {tensor.digest for tensor in tensors if tensor.name in tied}
    if len(digests) > 1:
        raise InvalidManifest(
            f"{tied.head} differs from {tied.embedding}, but the model's config.json ties them: send equal ones, or "
            "the embedding alone"
        )
