"""What a client has sent last, and what the next weights change in it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import xxhash

from rollout_service.client._compare import Changed, Comparison, Elements, OldBytes, view_of
from rollout_service.client._delta_parts import part_of
from rollout_service.client._laps import Laps
from rollout_service.client._parts import Part, warn_of_pageable_memory
from rollout_service.client._pieces import Span, batches_of, pieces_of
from rollout_service.client._tensors import describe
from rollout_service.gpu_streams import lies_on_gpu, on_device, own_stream_of
from rollout_service.model.convert import Named
from rollout_service.pinning import pin, take_host_memory
from rollout_service.protocol import delta
from rollout_service.protocol.base import NEXT, NewVersion
from rollout_service.protocol.delta_parts import tensors_of_parts
from rollout_service.protocol.upload import DTYPE_BYTES, Delta, UploadTensor, base_digest
from rollout_service.quant.verdicts import Verdicts
from rollout_service.store.manifest import CHUNK_BYTES, joined_digests
from rollout_service.threads import in_threads, io_threads
from rollout_service.views import bytes_of

LARGEST_SHARE = 1 / 8
"""Of a version's bytes that its delta may have: to make and apply a larger one takes about as long as to send all."""

Changes = list[Changed | None]
"""Of each tensor of a table, in its order; None: it is what it was."""

_SpanSegment = tuple[Span, delta.Segment]
"""What changes in a span, encoded."""


_Job = tuple[int, list[_SpanSegment | Elements]]
"""What changes in a piece."""

_Replaced = dict[tuple[int, int], bytes]
"""Old bytes, by their piece and where they begin in it."""


@dataclass(frozen=True, slots=True)
class _Older:
    """A version that was changed to a newer one."""

    version: int | None
    digests: list[str]
    changes: Changes
    """That made the newer one."""
    replaced: _Replaced = field(default_factory=dict)


def nbytes_of(changes: Changes) -> int:
    """What they have to be sent."""
    return sum(len(changed.encoded) for changed in changes if changed is not None)


class SentWeights:
    """The tensors of one version, as they are stored, in the host's memory. For one thread at a time."""

    def __init__(self, table: tuple[UploadTensor, ...]) -> None:
        self.table = table
        self.version: int | None = None
        """Which it is; None: none that is known to be committed."""
        self._newer: tuple[int, Changes] | None = None
        """A version that is committed, and what it changes in this one."""
        self._older: _Older | None = None
        """What this one is changed back to if it is pushed again."""
        self._pieces = pieces_of(table)
        self._batches = batches_of(self._pieces)
        self._batch_of = {index: number for number, batch in enumerate(self._batches) for index in batch.pieces}
        self._of_batches: list[torch.Tensor | None] = [None] * len(self._batches)
        """The bytes of each batch, so that one copy brings them to a GPU; of which those of its pieces are views:"""
        self._kept: list[torch.Tensor | None] = [None] * len(self._pieces)
        self._taking: dict[int, Future[None]] = {}
        """Of batches, whose memory threads take."""
        self._unpin: list[Callable[[], None]] = []
        # before the memory is unmapped, of which this object holds views until then
        weakref.finalize(self, _call_each, self._unpin).atexit = False
        self._spans: dict[int, list[tuple[int, Span]]] = defaultdict(list)
        for index, piece in enumerate(self._pieces):
            for span in piece.spans:
                self._spans[span.tensor].append((index, span))
        self._digests = [""] * len(table)
        self._parts = tensors_of_parts([tensor.nbytes for tensor in table])

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.table)

    def may_be_base_of(self, version: NewVersion, table: tuple[UploadTensor, ...]) -> bool:
        """Whether ``version``, with tensors as of ``table``, may be pushed as a delta of this one."""
        return table == self.table and self.version is not None and (version == NEXT or self.version < version)

    def take(self, stored: Iterable[Named], laps: Laps | None = None) -> Iterator[torch.Tensor]:
        """Become these tensors, one after the other; yields the bytes of each, uint8 [N], in one piece or several.

        Threads make memory ahead, registered with the GPU that has the first tensor, and hash what is there.
        """
        self._become_none()
        laps = laps or Laps()
        laps.end("announce")
        memory, hashing = (ThreadPoolExecutor(io_threads(), name) for name in ("delta-memory", "delta-digests"))
        digests: list[Future[str]] = []
        try:
            for number, (_, tensor) in enumerate(stored):
                laps.end("quantize")
                if not number:
                    self._begin_memory(memory, tensor.device if lies_on_gpu(tensor) else None)
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
        """The bytes of each tensor, likewise."""
        for number in range(len(self.table)):
            yield from self._bytes_of(number)

    def changes_to(
        self,
        stored: Iterable[Named],
        verdicts: Verdicts | None = None,
        made: Callable[[Part], None] | None = None,
    ) -> Changes | None:
        """What makes these tensors ``stored``, which has the same names, dtypes and shapes in the same order.

        None if it has more than ``LARGEST_SHARE`` of their bytes, or a part would be too large: these are ``stored``
        then, and no version.

        ``verdicts``: that ``stored`` asks, as ``Converter.convert`` does. What is told of their numbers is required
        before this returns, for tensors that are compared also before anything here is changed.

        ``made``: called by threads with the parts of the delta, each as soon as its tensors are compared.
        """

        def tell(part: int, changes: Sequence[Changed | None]) -> None:
            if made is not None:
                tensors = self._parts[part]
                nbytes = sum(self.table[number].nbytes for number in tensors)
                made(part_of(part, tensors.start, changes, nbytes))

        verdicts = verdicts or Verdicts()
        most_bytes = LARGEST_SHARE * self.nbytes
        coming = enumerate(stored)
        old = OldBytes(
            self._pieces,
            [each for each in self._kept if each is not None],
            self._batches,
            [each for each in self._of_batches if each is not None],
            self._parts,
        )
        with Comparison(old, verdicts, tell) as comparison:
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
        for number, tensor in comparison.waiting.items():
            self._replace(number, bytes_of(tensor))
            self._digests[number] = self._digest(number)
        for number, (_, tensor) in coming:
            self._replace(number, bytes_of(tensor))
            self._digests[number] = self._digest(number)
            del tensor
            verdicts.require()
        verdicts.require()
        return None

    def as_base(self) -> Delta:
        """The announcement of a delta of this version."""
        assert self.version is not None, "of a version that is not committed there is no delta"
        return Delta(base=self.version, base_digest=base_digest(self._digests))

    def change(self, changes: Changes) -> None:
        """Become what ``changes`` make of these tensors; it is no version yet."""
        self._become_none()
        self._in_threads(self._change, changes)
        self._digests = _digests_after(self._digests, changes)

    def note_newer(self, version: int, changes: Changes) -> None:
        """A delta of this version was committed as ``version``."""
        self._newer = version, changes

    def apply_newer(self) -> None:
        """Become the version that was committed last before anything is pushed; ``become_newer`` goes back if need be.

        If this fails it is no version.
        """
        if self._newer is None:
            return
        version, changes = self._newer
        older = _Older(self.version, self._digests, changes)
        self._become_none()
        self._in_threads(partial(self._change, replaced=older.replaced), changes)
        self._digests = _digests_after(older.digests, changes)
        self.version, self._older = version, older

    def become_newer(self, pushed: NewVersion) -> None:
        """Become the version that was committed last, unless it is pushed again: that must be the same delta again."""
        if self._newer is not None and self._newer[0] != pushed:
            version, changes = self._newer
            self.change(changes)
            self.version = version
        elif self._older is not None and self.version == pushed:
            older, version = self._older, self.version
            self._become_none()
            self._in_threads(partial(self._change_back, replaced=older.replaced), older.changes)
            self.version, self._digests, self._newer = older.version, older.digests, (version, older.changes)
        self._older = None

    def _become_none(self) -> None:
        """No version, whatever happens to whoever changes the bytes."""
        self.version = self._newer = self._older = None

    def _in_threads(self, change: Callable[[_Job], None], changes: Changes) -> None:
        """Call ``change`` with those of each piece."""
        jobs: dict[int, list[_SpanSegment | Elements]] = defaultdict(list)
        for number, changed in enumerate(changes):
            if changed is None:
                continue
            if changed.elements is not None:
                for (index, _), elements in zip(self._spans[number], changed.elements, strict=True):
                    jobs[index].append(elements)
                continue
            for index, span, segment in self._segments(number, changed):
                jobs[index].append((span, segment))
        for _ in in_threads(change, list(jobs.items())):
            pass

    def _bytes_of(self, number: int) -> Iterator[torch.Tensor]:
        for index, span in self._spans[number]:
            kept = self._kept[index]
            assert kept is not None, "nothing was taken yet"
            yield kept[span.place]

    def _replace(self, number: int, flat: torch.Tensor) -> None:
        for (_, span), kept in zip(self._spans[number], self._bytes_of(number), strict=True):
            kept.copy_(flat[span.part])

    def _digest(self, number: int) -> str:
        """Hash a tensor that is kept, as ``StoredTensor.digest``."""
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

    def _begin_memory(self, threads: ThreadPoolExecutor, gpu: torch.device | None) -> None:
        for number, batch in enumerate(self._batches):
            if self._of_batches[number] is None:
                self._taking[number] = threads.submit(self._take_memory, number, batch.nbytes, gpu)

    def _take_memory(self, number: int, nbytes: int, gpu: torch.device | None) -> None:
        """Take a batch's memory, registered with a GPU if possible."""
        memory = take_host_memory(nbytes)
        if gpu is not None:
            try:
                with on_device(gpu):
                    self._unpin.append(pin(memory))
            except OSError as error:
                warn_of_pageable_memory(str(error).rpartition(": ")[2])  # not once for each size
        # kept here, and not by the future alone: it must not be unmapped before it is unpinned
        self._of_batches[number] = torch.frombuffer(memory, dtype=torch.uint8)

    def _await_memory(self, tensor: int) -> None:
        """Wait for the memory of a tensor."""
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

    def _segments(self, number: int, changed: Changed) -> Iterator[tuple[int, Span, delta.Segment]]:
        """What changes in a tensor, with the span that has it, and the piece of that."""
        tensor = self.table[number]
        spans = iter(self._spans[number])
        index, span = next(spans)
        encoded = memoryview(changed.encoded)
        for segment in delta.changed_segments(encoded, tensor.nbytes, DTYPE_BYTES[tensor.dtype]):
            while segment.place.start >= span.part.stop:
                index, span = next(spans)
            yield index, span, segment

    def _change(self, job: _Job, replaced: _Replaced | None = None) -> None:
        """``replaced``: where the old bytes are put of what is not told by differences."""
        for index, kept, numbers, change in self._changed(job):
            if isinstance(change, Elements):
                numbers[change.positions] += change.differences.view(numbers.dtype)
                continue
            span, segment = change
            place = _place_of(span, segment)
            if replaced is not None and delta.new_bytes(segment) is not None:
                replaced[index, place.start] = bytes(kept[place])
            delta.apply_segment(segment, kept[place], numbers.itemsize)

    def _change_back(self, job: _Job, replaced: _Replaced) -> None:
        """What ``_change`` did."""
        for index, kept, numbers, change in self._changed(job):
            if isinstance(change, Elements):
                numbers[change.positions] -= change.differences.view(numbers.dtype)
                continue
            span, segment = change
            place = _place_of(span, segment)
            if (old := replaced.get((index, place.start))) is not None:
                kept[place] = old
                continue
            positions, differences = delta.decode_changes(segment, place.stop - place.start, numbers.itemsize)
            np.frombuffer(kept[place], numbers.dtype)[positions] -= differences

    def _changed(self, job: _Job) -> Iterator[tuple[int, memoryview, delta.Array, _SpanSegment | Elements]]:
        """Each change, with its piece's place, bytes, and bits of elements."""
        index, changes = job
        kept = self._kept[index]
        assert kept is not None, "nothing was taken yet"
        data = view_of(kept)
        numbers = np.frombuffer(data, delta.UNSIGNED[self._pieces[index].itemsize])
        for change in changes:
            yield index, data, numbers, change


def prepare(gpu: torch.device | None) -> None:
    """Compile what ``changes_to`` needs for tensors on a GPU, or on the CPU, which takes seconds once."""
    device = gpu or torch.device("cpu")
    # with and without aligned addresses; the sum of each dtype's is a multiple of 16
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


def _place_of(span: Span, segment: delta.Segment) -> slice:
    """Of a segment, in the span's piece."""
    start = span.place.start - span.part.start
    return slice(start + segment.place.start, start + segment.place.stop)


def _digests_after(digests: list[str], changes: Changes) -> list[str]:
    """Of each tensor, as ``StoredTensor.digest``."""
    return [old if changed is None else changed.digest for old, changed in zip(digests, changes, strict=True)]
