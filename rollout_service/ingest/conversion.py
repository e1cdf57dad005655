"""Background conversion of one version: read tensors, quantize them as planned, and write them to the version's
files."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch

from rollout_service.errors import InvalidManifest, RolloutServiceError
from rollout_service.gpu.streams import own_stream_done
from rollout_service.ingest.rooms import Rooms
from rollout_service.ingest.sources.shared_memory import GpuMemory, SharedGroup
from rollout_service.metrics.process import count_converted, counted_conversion
from rollout_service.model.convert import Named, tensor_bytes
from rollout_service.quant.verdicts import Verdicts
from rollout_service.store.manifest import StoredTensor
from rollout_service.store.writer import VersionWriter

if TYPE_CHECKING:
    from rollout_service.ingest.batch_plan import BatchPlans

GPU = torch.device("cuda", 0)
"""The GPU with which a log's memory is registered, if there is one."""

FAILURES = (RolloutServiceError, OSError, RuntimeError)
"""Errors that reading, converting and writing raise. torch raises RuntimeError, for example if a GPU is out of
memory."""

Read: TypeAlias = Callable[[Sequence[str]], Iterable[Named]]
"""Yields the tensors of these names, one after the other."""


class Convert(Protocol):
    """The interface of ``Converter.convert``."""

    def __call__(self, tensors: Iterable[Named], *, to_cpu: bool, verdicts: Verdicts | None = None) -> Iterator[Named]:
        """See ``Converter.convert``."""


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
        convert: Convert,
        executor: Executor,
    ) -> None:
        """``convert``: ``Converter.convert``, or an equivalent for tensors that come as they are stored."""
        self._version, self._writer, self._converts = version, writer, convert
        self._executor = executor
        self._tasks: list[Future[None]] = []
        self._waiting: deque[Sequence[str]] = deque()
        """Batches of ``begin_together`` that no thread has begun. A replacement starts another queue."""
        self._failure: RolloutServiceError | None = None
        self._failed: dict[str, RolloutServiceError] = {}
        """Tensors that could not be converted, and that may be sent again."""
        self._noting = threading.Lock()
        self._read: dict[str, int] = {}
        self.quantize_s = self.store_s = 0.0
        """Time of all threads together, in seconds, for converting tensors and for storing them."""
        self._stored: tuple[StoredTensor, ...] | None = None
        self._turn = threading.Lock()
        """Lock for threads that only launch kernels and wait: see ``Rooms``."""
        self.gpu = GPU if writer.are_rooms_registered else None
        """The GPU with which the log's memory is registered. Each thread reads tensors in its own stream there."""

    @property
    def failure(self) -> RolloutServiceError | None:
        """Return the error of the first failed conversion: this version is lost and must begin anew.

        A failure is cleared if it came from a part of another uploader, and the uploader that began replaces that part.
        """
        return self._failure or next(iter(list(self._failed.values())), None)

    @property
    def read_bytes(self) -> int:
        """Return the size in bytes of all tensors read so far, as received."""
        return sum(list(self._read.values()))

    def begin(self, names: Sequence[str], read: Read, executor: Executor | None = None) -> Future[None]:
        """Convert tensors that come once: the first failure ends the version.

        ``executor``: its threads take turns, except while they wait for a GPU. None: this conversion's executor, whose
        threads run at once.

        The future is done, or cancelled, once the tensors are no longer read; it never raises.
        """
        self._tasks.append((executor or self._executor).submit(self._convert, names, read, executor is not None))
        return self._tasks[-1]

    def begin_shared(self, group: SharedGroup, plans: "BatchPlans | None") -> Future[None]:
        """Convert tensors in a trainer's shared memory; otherwise like ``begin``.

        ``plans``: plans for batches in GPU memory; None: tensors are converted one by one.
        """
        if plans is None or self.gpu is None or not isinstance(group.memory, GpuMemory):
            return self.begin(group.names, lambda _: group.read(), group.executor)
        self._tasks.append((group.executor or self._executor).submit(self._convert_planned, group, group.memory, plans))
        return self._tasks[-1]

    def begin_replaceable(
        self,
        batches: Sequence[Sequence[str]],
        read: Read,
        converted: Callable[[Sequence[str]], None],
        instead_of: Callable[[], object] | None = None,
        *,
        in_turns: bool = False,
    ) -> None:
        """Convert tensors whose bytes may be sent again: a failure holds until they are converted anew.

        Args:
            batches: lists of tensors that are read together.
            converted: called from a thread once the tensors are no longer read; never called concurrently.
            in_turns: one thread at a time works with the tensors, as in ``begin``.
            instead_of: removes the bytes that these replace. It runs after all earlier conversions, so that none of
                them can overwrite the result.
        """
        before: list[Future[None]] = []
        if instead_of is not None:
            before = list(self._tasks)
            # conversions of the old queue must not take batches that came after the replacement
            self._waiting = deque()
            self._tasks.append(self._executor.submit(_after, before, instead_of))
        for names in batches:
            self._submit(_after, before, self._convert_replaceable, names, read, converted, in_turns)

    def begin_together(
        self,
        names: Sequence[str],
        read: Read,
        converted: Callable[[Sequence[str]], None],
        executor: Executor,
        most: int,
    ) -> None:
        """Convert up to ``most`` waiting batches at once; otherwise like ``begin_replaceable`` with ``in_turns``.

        A thread of ``executor`` takes all batches that have arrived when it starts. They share kernel launches, a copy
        and a synchronization.
        """
        self._waiting.append(names)
        self._tasks.append(executor.submit(self._convert_waiting, self._waiting, read, converted, most))

    def renumber(self, version: int) -> None:
        """Change the version number."""
        self._version = version

    async def finish(
        self, *, tied: TiedHead | None = None, check: Callable[[Iterable[StoredTensor]], None] | None = None
    ) -> tuple[StoredTensor, ...]:
        """Wait until all tensors are converted, and sync the files. May be called again.

        Args:
            tied: these two are the same, and the head need not have been sent.
            check: raises RolloutServiceError for tensors that differ from the announcement.

        Raises the error of the first failed conversion.
        """
        await asyncio.gather(*map(asyncio.wrap_future, self._tasks))
        if self._stored is None and self.failure is None:
            loop = asyncio.get_running_loop()
            self._stored = await loop.run_in_executor(self._executor, self._finish, tied, check)
        if (failure := self.failure) is not None:
            raise failure
        assert self._stored is not None
        return self._stored

    async def stop(self) -> None:
        """Stop converting, and close the files."""
        # a running conversion cannot be cancelled, and must not write once its file is closed
        running = [task for task in self._tasks if not task.cancel()]
        await asyncio.gather(*map(asyncio.wrap_future, running), return_exceptions=True)
        self._writer.close()

    def stop_and_wait(self) -> None:
        """Do the same without an event loop."""
        wait([task for task in self._tasks if not task.cancel()])
        self._writer.close()

    def _submit(self, work: Callable[..., None], *args: object) -> None:
        self._tasks.append(self._executor.submit(work, *args))

    def _convert(self, names: Sequence[str], read: Read, in_turns: bool) -> None:
        if self._failure is None:
            with self._failures_kept():
                self._write(partial(read, names), in_turns)

    def _convert_planned(self, group: SharedGroup, memory: GpuMemory, plans: "BatchPlans") -> None:
        from rollout_service.ingest.planned_batch import PlannedBatch  # needs triton

        plan = plans.of(group.tensors)
        if plan is None:
            self._convert(group.names, lambda _: group.read(), True)
        elif self._failure is None:
            assert self.gpu is not None
            with self._failures_kept():
                began = time.perf_counter()
                batch = PlannedBatch(group.tensors, plan, memory, group.offset)
                queued_s = batch.store(self._writer, plans.converter, self.gpu, self._turn)
                took_s = time.perf_counter() - began
                count_converted(sum(plan.read_bytes.values()), took_s)
                with self._noting:
                    self._read |= plan.read_bytes
                    self.quantize_s += queued_s
                    self.store_s += took_s - queued_s

    def _convert_waiting(
        self, waiting: deque[Sequence[str]], read: Read, converted: Callable[[Sequence[str]], None], most: int
    ) -> None:
        names: list[str] = []
        with suppress(IndexError):  # another thread has already taken the rest
            for _ in range(most):
                names += waiting.popleft()
        if names:
            self._convert_replaceable(names, read, converted, in_turns=True)

    def _convert_replaceable(
        self, names: Sequence[str], read: Read, converted: Callable[[Sequence[str]], None], in_turns: bool
    ) -> None:
        failed = self._failures_of(names, read, in_turns)
        # convert each tensor by itself: the others are sound, and only the failing one must be sent again
        if failed and len(names) > 1:
            failed = {}
            for each in names:
                failed |= self._failures_of([each], read, in_turns)
        with self._noting:
            for name in names:
                self._failed.pop(name, None)
            self._failed |= failed
            converted(names)

    def _failures_of(self, names: Sequence[str], read: Read, in_turns: bool) -> dict[str, RolloutServiceError]:
        try:
            self._write(partial(read, names), in_turns)
        except FAILURES as error:
            return dict.fromkeys(names, self._as_ours(error))
        return {}

    def _write(self, read: Callable[[], Iterable[Named]], in_turns: bool = False) -> None:
        turn = self._turn if in_turns else None
        began = time.perf_counter()
        tensors = read()  # a delta's are decoded here
        read_s = time.perf_counter() - began
        tensors = self._noted(tensors)
        gpu = self.gpu
        verdicts = Verdicts() if self._writer.has_rooms else None
        convert = partial(self._converts, to_cpu=verdicts is None, verdicts=verdicts)
        with (
            nullcontext() if gpu is None else own_stream_done(gpu),
            nullcontext() if verdicts is None else Rooms(self._writer, gpu, verdicts, turn) as rooms,
        ):
            began, store_s = time.perf_counter(), 0.0
            for name, tensor in counted_conversion(convert, tensors):
                converted = time.perf_counter()
                if rooms is not None:
                    rooms.fill(name, tensor)
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
        tensors: tuple[StoredTensor, ...] = ()
        with self._failures_kept():
            if tied is not None and tied.head in self._writer.unwritten:
                # a CPU engine holds a packed copy of the head, which it rebuilds only when a head is loaded
                self._write(lambda: [(tied.head, self._read_back(tied.embedding))])
            tensors = self._writer.finish()
            if check is not None:
                check(tensors)
            if tied is not None:
                _require_equal_heads(tensors, tied)
        return tensors

    def _read_back(self, name: str) -> torch.Tensor:
        place = self._writer.place(name)
        stored = torch.frombuffer(self._writer.read(name), dtype=getattr(torch, place.dtype))
        return stored.view(place.shape)

    @contextmanager
    def _failures_kept(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            self._failure = self._failure or self._as_ours(error)

    def _as_ours(self, error: Exception) -> RolloutServiceError:
        if isinstance(error, RolloutServiceError):
            return error
        return RolloutServiceError(f"version {self._version} could not be stored: {error}")


def _after(earlier: Sequence[Future[None]], work: Callable[..., object], *args: object) -> None:
    wait(earlier)  # all of these started earlier, so none of them waits for this thread
    work(*args)


def _require_equal_heads(tensors: tuple[StoredTensor, ...], tied: TiedHead) -> None:
    # vLLM on a GPU drops the head of a tied model, so different weights in it would be lost silently
    digests = {tensor.digest for tensor in tensors if tensor.name in tied}
    if len(digests) > 1:
        raise InvalidManifest(
            f"{tied.head} differs from {tied.embedding}, but the model's config.json ties them: send equal ones, or "
            "the embedding alone"
        )
