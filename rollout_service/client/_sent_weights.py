"""The weights that a client sent last, as the base of the next delta."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
import xxhash

from rollout_service.client._compare import Changed, Comparison, OldBytes, view_of
from rollout_service.client._parts import Part, warn_of_pageable_memory
from rollout_service.client._pieces import Span, batches_of, pieces_of
from rollout_service.client._tensors import describe
from rollout_service.gpu.pinning import pin, take_host_memory
from rollout_service.gpu.streams import lies_on_gpu, on_device, own_stream_of
from rollout_service.model.convert import Named
from rollout_service.protocol import delta
from rollout_service.protocol.base import NEXT, NewVersion
from rollout_service.protocol.delta_parts import TensorChange, encode_header, tensors_of_parts
from rollout_service.protocol.upload import DTYPE_BYTES, Delta, UploadTensor, base_digest
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.runtime.threads import in_threads, io_threads
from rollout_service.runtime.views import bytes_of
from rollout_service.store.manifest import CHUNK_BYTES, joined_digests

LARGEST_SHARE = 1 / 8
"""Maximum size of a delta, as a share of the version's bytes. A larger one takes about as long as sending
everything."""

Changes = list[Changed | None]
"""The change of each tensor of a table, in order. None: the tensor is unchanged."""


def nbytes_of(changes: Changes) -> int:
    """Return the encoded size of the changes in bytes."""
    return sum(len(changed.encoded) for changed in changes if changed is not None)


def part_of(index: int, first: int, changes: Sequence[Changed | None], tensor_bytes: int) -> Part:
    """Return one part of a delta.

    ``first``: table index of its first tensor. ``changes``: of each of its tensors. ``tensor_bytes``: their size.
    """
    told = [None if each is None else TensorChange(len(each.encoded), each.digest) for each in changes]
    pieces = [encode_header(first, told), *(each.encoded for each in changes if each is not None)]
    # numpy copies without the GIL
    whole = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
    return Part(index, [torch.from_numpy(whole)], None, counts=tensor_bytes)


class Laps:
    """A stopwatch for the phases of a push. Not thread-safe."""

    def __init__(self) -> None:
        self._begun = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """Add the time since the last call to the phase."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._seconds.items())
        return f"{self._last - self._begun:.2f} s ({phases})"


class SentWeights:
    """The stored tensors of one version, in host memory. Not thread-safe."""

    def __init__(self, table: tuple[UploadTensor, ...]) -> None:
        self.table = table
        self.version: int | None = None
        """The version number. None: these weights are not known to be committed."""
        self._pieces = pieces_of(table)
        self._batches = batches_of(self._pieces)
        self._batch_of = {index: number for number, batch in enumerate(self._batches) for index in batch.pieces}
        self._of_batches: list[torch.Tensor | None] = [None] * len(self._batches)
        """The bytes of each batch, so that one copy moves them to a GPU. The pieces in ``_kept`` are views of them."""
        self._kept: list[torch.Tensor | None] = [None] * len(self._pieces)
        self._taking: dict[int, Future[None]] = {}
        """The running allocations, by batch index."""
        self._unpin: list[Callable[[], None]] = []
        # pinned memory stays mapped until it is unpinned
        weakref.finalize(self, _call_each, self._unpin).atexit = False
        self._spans: dict[int, list[tuple[int, Span]]] = defaultdict(list)
        for index, piece in enumerate(self._pieces):
            for span in piece.spans:
                self._spans[span.tensor].append((index, span))
        self._digests = [""] * len(table)
        self._parts = tensors_of_parts([tensor.nbytes for tensor in table])

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.table)

    def may_be_base_of(self, version: NewVersion, table: tuple[UploadTensor, ...]) -> bool:
        """Return True if ``version``, with tensors as in ``table``, may be pushed as a delta of this one."""
        return table == self.table and self.version is not None and (version == NEXT or self.version < version)

    def take(self, stored: Iterable[Named], laps: Laps | None = None) -> Iterator[torch.Tensor]:
        """Replace the kept weights with ``stored``, tensor by tensor. Yields the bytes of each, uint8 [N], in one or
        more pieces.

        Threads allocate memory ahead, pinned for the GPU of the first tensor, and hash the copied bytes.
        """
        self.version = None  # before any byte changes
        laps = laps or Laps()
        laps.end("announce")
        memory, hashing = (ThreadPoolExecutor(io_threads(), name) for name in ("delta-memory", "delta-digests"))
        digests: list[Future[str]] = []
        try:
            for number, (_, tensor) in enumerate(stored):
                laps.end("quantize")
                if not number:
                    gpu = tensor.device if lies_on_gpu(tensor) else None
                    self._taking = {
                        batch: memory.submit(self._take_memory, batch, gpu)
                        for batch, taken in enumerate(self._of_batches)
                        if taken is None
                    }
                self._await_memory(number)
                laps.end("memory")
                self._replace(number, bytes_of(tensor))
                del tensor
                laps.end("copy")
                digests.append(hashing.submit(self._digest, number))
                yield from self._bytes_of(number)
                laps.end("send")
            laps.end("quantize")
            self._digests = [each.result() for each in digests]
            laps.end("hash")
        finally:
            for pool in (memory, hashing):
                pool.shutdown(wait=False, cancel_futures=True)
            self._taking = {}

    def stream(self) -> Iterator[torch.Tensor]:
        """Yield the bytes of each tensor, in the form of ``take``."""
        for number in range(len(self.table)):
            yield from self._bytes_of(number)

    def changes_to(
        self,
        stored: Iterable[Named],
        checks: DeferredChecks | None = None,
        made: Callable[[Part], None] | None = None,
    ) -> Changes | None:
        """Return the changes from these tensors to ``stored``, which must have the same names, dtypes, shapes and
        order.

        Returns None if the changes exceed ``LARGEST_SHARE`` of the bytes, or if a part would be too large. This object
        then holds ``stored``, without a version number.

        Args:
            stored: the new tensors.
            checks: deferred checks of ``stored``, see ``Converter.convert``. They are required before this returns.
                For compared tensors they are required before any kept byte changes.
            made: called by threads with each part of the delta as soon as its tensors are compared.
        """

        def tell(part: int, changes: Sequence[Changed | None]) -> None:
            if made is not None:
                tensors = self._parts[part]
                nbytes = sum(self.table[number].nbytes for number in tensors)
                made(part_of(part, tensors.start, changes, nbytes))

        checks = checks or DeferredChecks()
        most_bytes = LARGEST_SHARE * self.nbytes
        coming = enumerate(stored)
        old = OldBytes(
            self._pieces,
            [each for each in self._kept if each is not None],
            self._batches,
            [each for each in self._of_batches if each is not None],
            self._parts,
        )
        with Comparison(old, checks, tell) as comparison:
            for number, (_, tensor) in coming:
                comparison.add(number, tensor)
                del tensor
                if comparison.changed_bytes > most_bytes or comparison.has_too_large_part:
                    break
            found = comparison.finish()
        changes = [found.get(number) for number in range(len(self.table))]
        if nbytes_of(changes) <= most_bytes and not comparison.has_too_large_part:
            return changes
        self.change(changes)
        waiting = [(number, (self.table[number].name, tensor)) for number, tensor in comparison.waiting.items()]
        for number, (_, tensor) in itertools.chain(waiting, coming):
            self._replace(number, bytes_of(tensor))
            self._digests[number] = self._digest(number)
            del tensor
            checks.require()
        checks.require()
        return None

    def as_base(self) -> Delta:
        """Return the announcement of a delta with this version as its base."""
        assert self.version is not None, "of a version that is not committed there is no delta"
        return Delta(base=self.version, base_digest=base_digest(self._digests))

    def change(self, changes: Changes) -> None:
        """Apply ``changes`` to the kept tensors, in threads. The result has no version number yet."""
        self.version = None  # before any byte changes
        jobs: dict[int, list[tuple[slice, delta.Segment]]] = defaultdict(list)
        for number, changed in enumerate(changes):
            for index, place, segment in () if changed is None else self._segments(number, changed):
                jobs[index].append((place, segment))
        for _ in in_threads(self._change, list(jobs.items())):
            pass
        self._digests = [
            old if changed is None else changed.digest for old, changed in zip(self._digests, changes, strict=True)
        ]

    def become(self, version: int, changes: Changes) -> None:
        """Change the kept weights to the committed ``version``. If this fails, they have no version number."""
        self.change(changes)
        self.version = version

    def _bytes_of(self, number: int) -> Iterator[torch.Tensor]:
        for index, span in self._spans[number]:
            kept = self._kept[index]
            assert kept is not None, "nothing was taken yet"
            yield kept[span.place]

    def _replace(self, number: int, flat: torch.Tensor) -> None:
        for (_, span), kept in zip(self._spans[number], self._bytes_of(number), strict=True):
            kept.copy_(flat[span.part])

    def _digest(self, number: int) -> str:
        """Return the digest of a kept tensor, as ``StoredTensor.digest``."""
        hasher, digests, left = xxhash.xxh3_128(), b"", CHUNK_BYTES
        for kept in self._bytes_of(number):
            data = view_of(kept)
            while data.nbytes:
                some, data = data[:left], data[left:]
                hasher.update(some)
                left -= some.nbytes
                if not left:
                    digests += hasher.digest()
                    hasher.reset()
                    left = CHUNK_BYTES
        return joined_digests(digests if digests and left == CHUNK_BYTES else digests + hasher.digest())[0]

    def _take_memory(self, number: int, gpu: torch.device | None) -> None:
        """Allocate a batch's memory, and pin it for a GPU if possible."""
        memory = take_host_memory(self._batches[number].nbytes)
        if gpu is not None:
            try:
                with on_device(gpu):
                    self._unpin.append(pin(memory))
            except OSError as error:
                # without the size, so that each reason is logged once
                warn_of_pageable_memory(str(error).rpartition(": ")[2])
        self._of_batches[number] = torch.frombuffer(memory, dtype=torch.uint8)

    def _await_memory(self, tensor: int) -> None:
        """Wait until a tensor's memory is allocated."""
        for index, _ in self._spans[tensor]:
            if self._kept[index] is not None:
                continue
            number = self._batch_of[index]
            batch = self._batches[number]
            if (taking := self._taking.pop(number, None)) is not None:
                taking.result()
            memory = self._of_batches[number]
            assert memory is not None, "threads have taken it"
            for piece, place in zip(batch.pieces, batch.places, strict=True):
                self._kept[piece] = memory[place]

    def _segments(self, number: int, changed: Changed) -> Iterator[tuple[int, slice, delta.Segment]]:
        """Yield the encoded segments of a tensor, each with the index of its piece and its byte range there."""
        tensor = self.table[number]
        spans = iter(self._spans[number])
        index, span = next(spans)
        encoded = memoryview(changed.encoded)
        for segment in delta.changed_segments(encoded, tensor.nbytes, DTYPE_BYTES[tensor.dtype]):
            while segment.place.start >= span.part.stop:
                index, span = next(spans)
            start = span.place.start - span.part.start
            yield index, slice(start + segment.place.start, start + segment.place.stop), segment

    def _change(self, job: tuple[int, list[tuple[slice, delta.Segment]]]) -> None:
        """Apply the changes of one piece."""
        index, changes = job
        kept = self._kept[index]
        assert kept is not None, "nothing was taken yet"
        data, itemsize = view_of(kept), self._pieces[index].itemsize
        for place, segment in changes:
            delta.apply_segment(segment, data[place], itemsize)


def prepare(gpu: torch.device | None) -> None:
    """Compile the kernels of ``changes_to`` for a GPU or the CPU, which takes seconds once."""
    device = gpu or torch.device("cpu")
    # with and without aligned addresses: the sizes of each dtype sum to a multiple of 16
    shapes = [(4096,), (1,), (15,)]
    tensors = {
        f"{dtype} {shape}": torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        for dtype in ("float32", "bfloat16", "float8_e4m3fn")
        for shape in shapes
    }
    sent = SentWeights(tuple(describe(name, tensor) for name, tensor in tensors.items()))
    with own_stream_of(device):
        for _ in sent.take(tensors.items()):
            pass
        for tensor in tensors.values():
            bytes_of(tensor)[0] = 1
        sent.changes_to(tensors.items())


def _call_each(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
