"""Find the changes between two versions, with threads or on the GPU that holds the new tensors.

``_gpu_compare`` finds changes on a GPU, and threads encode them while another thread queues GPU work. If too much
of a piece has changed, or the GPU has no room, threads compare the piece from its differences.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from rollout_service.client._gpu_compare import Counting, Found, Uploads, queue_count, queue_search, runs_of
from rollout_service.client._pieces import Batch, Piece
from rollout_service.gpu.streams import lies_on_gpu, queue_to_host, record_waiter
from rollout_service.protocol import delta
from rollout_service.protocol.delta_parts import most_header_bytes
from rollout_service.protocol.upload import LARGEST_PART_BYTES
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.runtime.threads import compute_threads
from rollout_service.runtime.views import SIGNED, bytes_of
from rollout_service.store.manifest import tensor_digests

logger = logging.getLogger("rollout_service.client")

AT_ONCE_BYTES = 256 << 20
"""Maximum host memory in bytes of the pieces being compared and encoded."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The change of one tensor."""

    encoded: bytes
    """The encoded change, see ``rollout_service.protocol.delta``."""
    digest: str
    """Digest of the new tensor, as ``StoredTensor.digest``."""


@dataclass(frozen=True, slots=True)
class _SpanChange:
    segments: list[bytes]
    """Encoded segments, in order."""
    digest: str | None
    """Digest of the new tensor. None: nothing has changed, or the span is not the whole tensor."""


def view_of(flat: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, uint8 [N], without a copy."""
    data: memoryview = flat.numpy().data
    return data


class OldBytes(NamedTuple):
    """The tensors of the old version, on the CPU."""

    pieces: Sequence[Piece]
    """The pieces (see ``pieces_of``), followed by the bytes of each as uint8 [N]."""
    of_pieces: Sequence[torch.Tensor]
    batches: Sequence[Batch]
    """The batches (see ``batches_of``), followed by the bytes of each as uint8 [N]. Tensors of ``of_pieces`` are views
    of them."""
    of_batches: Sequence[torch.Tensor]
    parts: Sequence[range]
    """The tensor indices of each part of a delta, see ``tensors_of_parts``."""


class Comparison:
    """Compares the tensors of a new version with the ``old`` one. A context manager for one thread."""

    def __init__(
        self, old: OldBytes, checks: DeferredChecks, tell: Callable[[int, Sequence[Changed | None]], None]
    ) -> None:
        """Prepare the comparison.

        Args:
            checks: deferred checks of the added tensors. They are required when a batch is awaited, and before
                ``finish`` returns.
            tell: called by a thread for each fully compared part that is small enough, before ``finish`` returns, with
                the part's index and the change of each of its tensors.
        """
        self._old, self._checks, self._tell = old, checks, tell
        self._piece, self._batch = 0, 0
        """Index of the next piece, and of the next batch."""
        self._on_gpu: dict[int, list[torch.Tensor]] = {}
        """The pieces of that batch that are on a GPU, each with the new tensors of its spans."""
        self._counting: tuple[Counting, Callable[[], None]] | None = None
        """The previous batch if a GPU compares it, and the call that requires its deferred checks."""
        self._uploads: dict[torch.device, Uploads] = {}
        self._pool = ThreadPoolExecutor(compute_threads(), "delta")
        self._compared: deque[tuple[Piece, int, Future[list[_SpanChange]]]] = deque()
        self._at_once = 0
        self._ends = {span.tensor: span.part.stop for piece in old.pieces for span in piece.spans}
        """Size of each tensor in bytes."""
        self._segments: dict[int, list[bytes]] = defaultdict(list)
        """Encoded segments of tensors whose comparison is unfinished. The dictionaries below hold the finished
        tensors."""
        self._encoded: dict[int, bytes] = {}
        self._digests: dict[int, Callable[[], str]] = {}
        self.waiting: dict[int, torch.Tensor] = {}
        """Added tensors whose piece is not complete yet."""
        self.changed_bytes = 0
        """Encoded size in bytes of the changes found so far."""
        self.has_too_large_part = False
        """True if the service would refuse a part of this delta because of its size."""
        self._part_of = {tensor: part for part, tensors in enumerate(old.parts) for tensor in tensors}
        self._lacking = [sum(tensor in self._ends for tensor in tensors) for tensors in old.parts]
        """Number of tensors of each part that are not compared to their end."""
        self._telling = ThreadPoolExecutor(1, "delta-parts")
        """A thread apart from the comparing threads, so that a finished part does not wait behind their work."""
        self._told: list[tuple[range, Future[list[Changed | None]]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for uploads in self._uploads.values():
            uploads.close()
        self._pool.shutdown(cancel_futures=True)
        self._telling.shutdown(cancel_futures=True)

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """Add the next tensor; ``number`` is its index in the table."""
        if tensor.nbytes:
            self.waiting[number] = tensor.contiguous()
        begun: set[int] = set()
        while self._piece < len(self._old.pieces) and self._old.pieces[self._piece].last == number:
            self._begin(self._piece)
            begun |= {span.tensor for span in self._old.pieces[self._piece].spans}
            self._piece += 1
        for each in begun:
            del self.waiting[each]

    def finish(self) -> dict[int, Changed | None]:
        """Return the change of each compared tensor, by table index.

        Raises QuantizationError for the first invalid tensor among those compared or converted with them.
        """
        self._read_counted()
        self._checks.require()
        self._compare_on_host()  # an incomplete batch: the caller stopped early and does not want the rest
        while self._compared:
            self._take_first()
        for part, tensors in enumerate(self._old.parts):
            if not any(tensor in self._ends for tensor in tensors):
                self._begin_telling(part)  # a part without compared tensors
        found: dict[int, Changed | None] = {}
        for tensors, told in self._told:
            found |= zip(tensors, told.result(), strict=True)
        return found | {tensor: self._await_change(tensor)() for tensor in self._encoded if tensor not in found}

    def _begin_telling(self, part: int) -> None:
        tensors = self._old.parts[part]
        found = [self._await_change(tensor) for tensor in tensors]
        nbytes = sum(len(self._encoded.get(tensor, b"")) for tensor in tensors)
        if nbytes + most_header_bytes(len(tensors)) > LARGEST_PART_BYTES:
            self.has_too_large_part = True
            return

        def tell() -> list[Changed | None]:
            changes = [each() for each in found]
            self._tell(part, changes)
            return changes

        self._told.append((tensors, self._telling.submit(tell)))

    def _await_change(self, tensor: int) -> Callable[[], Changed | None]:
        """Return a function that waits for a tensor's digest and returns its change. The tensor may be empty."""
        encoded = self._encoded.get(tensor)
        if not encoded:
            return lambda: None
        digest = self._digests[tensor]
        return lambda: Changed(encoded, digest())

    def _begin(self, index: int) -> None:
        piece = self._old.pieces[index]
        # tensors, not views: each view that torch makes releases the GIL, which threads are waiting for
        tensors = [self.waiting[span.tensor] for span in piece.spans]
        if lies_on_gpu(tensors[0]) and len({tensor.device for tensor in tensors}) == 1:
            self._on_gpu[index] = tensors
        else:
            self._begin_on_host(index, tensors)
        if index == self._old.batches[self._batch].last:
            self._begin_batch()

    def _begin_on_host(self, index: int, tensors: list[torch.Tensor]) -> None:
        """Compare a piece on the CPU; ``tensors`` are those of its spans."""
        piece = self._old.pieces[index]
        number, part, _ = piece.spans[0]
        if piece.is_part and not part.start:
            self._digests[number] = self._pool.submit(_digest_of, view_of(bytes_of(tensors[0]).cpu())).result
        new = [bytes_of(tensor)[span.part].cpu() for span, tensor in zip(piece.spans, tensors, strict=True)]
        self._submit(piece, piece.nbytes, partial(_compare_piece, self._old.of_pieces[index], new, piece))

    def _begin_batch(self) -> None:
        """Start the comparison of the complete batch, as far as it has not started."""
        number, self._batch = self._batch, self._batch + 1
        counted: Counting | None = None
        devices = {flats[0].device for flats in self._on_gpu.values()}
        if len(self._on_gpu) == len(self._old.batches[number].pieces) and len(devices) == 1:
            try:
                counted = self._count_changes(number, devices.pop())
            except torch.cuda.OutOfMemoryError as error:
                _warn_of_no_room(error)
        require_sound = self._checks.collect()
        # the GPU has the next batch queued while this thread waits for the previous one
        self._read_counted()
        if counted is None:
            require_sound()
            self._compare_on_host()
        else:
            self._counting = counted, require_sound
        self._on_gpu = {}

    def _count_changes(self, number: int, device: torch.device) -> Counting:
        batch = self._old.batches[number]
        uploads = self._uploads.setdefault(device, Uploads(device))
        pieces, new = (
            [self._old.pieces[index] for index in batch.pieces],
            [self._on_gpu[index] for index in batch.pieces],
        )
        counted = queue_count(batch, pieces, uploads.take(number, self._old.of_batches[number]), new)
        if number + 1 < len(self._old.batches):
            with suppress(torch.cuda.OutOfMemoryError):  # there may be room when its turn comes
                uploads.begin(number + 1, self._old.of_batches[number + 1])
        return counted

    def _compare_on_host(self) -> None:
        for index, tensors in self._on_gpu.items():
            self._begin_on_host(index, tensors)
        self._on_gpu = {}

    def _read_counted(self) -> None:
        """Read the counted batch from the GPU and encode it."""
        if self._counting is None:
            return
        (counted, require_sound), self._counting = self._counting, None
        require_sound()
        counts, batch = counted.counts(), counted.batch
        if counted.digests is not None:
            made = self._pool.submit(counted.digests.read)
            self._digests |= {tensor: partial(_digest_in, made, tensor) for tensor in counted.digests.tensors}
        pieces = [self._old.pieces[index] for index in batch.pieces]
        encoding: dict[int, Callable[[], list[_SpanChange]]] = {}
        for run in runs_of(pieces, counts):
            try:
                encoding |= self._read(counted, pieces, counts, run)
            except torch.cuda.OutOfMemoryError as error:
                _warn_of_no_room(error)
        for number, (index, place, piece, count) in enumerate(
            zip(batch.pieces, batch.places, pieces, counts, strict=True)
        ):
            if number in encoding:
                held = count * (4 + delta.GAP_PLANES + 2 * piece.itemsize)  # see ``Found``
                self._submit(piece, held, encoding[number])
                continue
            copy = queue_to_host(counted.differences[place])
            wait = record_waiter(counted.differences.device)
            self._submit(
                piece, piece.nbytes, partial(_compare_by_difference, self._old.of_pieces[index], copy, wait, piece)
            )

    def _read(
        self, counted: Counting, pieces: list[Piece], counts: list[int], run: slice
    ) -> dict[int, Callable[[], list[_SpanChange]]]:
        """Return the remaining thread work for each piece of a run. Raises ``torch.cuda.OutOfMemoryError``."""
        batch, itemsize = counted.batch, pieces[run.start].itemsize
        begin, end = batch.places[run.start].start, batch.places[run.stop - 1].stop
        changed = queue_search(counted.differences[begin:end].view(SIGNED[itemsize]), sum(counts[run]))
        left: dict[int, Callable[[], list[_SpanChange]]] = {}
        start = 0
        for number in range(run.start, run.stop):
            changes = slice(start, start + counts[number])
            first = (batch.places[number].start - begin) // itemsize
            kept = self._old.of_pieces[batch.pieces[number]]
            left[number] = partial(_encode, kept, changed, changes, first, pieces[number])
            start = changes.stop
        return left

    def _submit(self, piece: Piece, nbytes: int, work: Callable[[], list[_SpanChange]]) -> None:
        """Queue ``work`` for a thread; ``nbytes`` is the memory in bytes that it holds."""
        while self._compared and (self._at_once + nbytes > AT_ONCE_BYTES or self._compared[0][-1].done()):
            self._take_first()
        self._compared.append((piece, nbytes, self._pool.submit(work)))
        self._at_once += nbytes

    def _take_first(self) -> None:
        piece, nbytes, future = self._compared.popleft()
        self._at_once -= nbytes
        for span, change in zip(piece.spans, future.result(), strict=True):
            self._segments[span.tensor] += change.segments
            self.changed_bytes += sum(map(len, change.segments))
            if change.digest is not None:
                self._digests[span.tensor] = partial(str, change.digest)
            if span.part.stop == self._ends[span.tensor]:  # here, while a GPU has work
                self._end_tensor(span.tensor)

    def _end_tensor(self, tensor: int) -> None:
        self._encoded[tensor] = delta.joined(self._segments.pop(tensor))
        part = self._part_of[tensor]
        self._lacking[part] -= 1
        if not self._lacking[part]:
            self._begin_telling(part)


def _digest_in(made: Future[dict[int, str]], tensor: int) -> str:
    return made.result()[tensor]


def _digest_of(data: memoryview) -> str:
    return tensor_digests(data)[0]


def _warn_of_no_room(error: Exception) -> None:
    logger.warning("what has changed is looked for on the CPU, since the GPU has no room: %s", error)


def _compare_piece(old: torch.Tensor, new: list[torch.Tensor], piece: Piece) -> list[_SpanChange]:
    """Compare a piece on the CPU, span by span."""
    found = []
    for span, flat in zip(piece.spans, new, strict=True):
        was, now = view_of(old[span.place]), view_of(flat)
        places = list(delta.segments(now.nbytes))
        if delta.is_small_and_equal(was, now):
            segments = [delta.NOTHING] * len(places)
        else:
            segments = [delta.encode_segment(was[place], now[place], piece.itemsize) for place in places]
        changed = any(segment != delta.NOTHING for segment in segments)
        found.append(_SpanChange(segments, _digest_of(now) if changed and not piece.is_part else None))
    return found


def _compare_by_difference(
    old: torch.Tensor, differences: torch.Tensor, wait: Callable[[], None], piece: Piece
) -> list[_SpanChange]:
    """Compare a piece from its differences (new bits minus old bits), which are on the host after ``wait``."""
    wait()
    dtype = SIGNED[piece.itemsize]
    new = (old.view(dtype) + differences.view(dtype)).view(torch.uint8)
    return _compare_piece(old, [new[span.place] for span in piece.spans], piece)


def _encode(old: torch.Tensor, found: Found, changes: slice, first: int, piece: Piece) -> list[_SpanChange]:
    """Encode the changes that a GPU has found in a piece, span by span. The GPU computes the digests, too.

    Args:
        changes: the slice of ``found`` that belongs to the piece.
        first: the piece's first element, in the numbering of ``found.positions``.
    """
    found.wait()
    itemsize = piece.itemsize
    positions, differences = found.positions[changes] - np.int32(first), found.differences[changes].copy()
    planes = found.planes[:, changes]
    # most of the thousands of spans are unchanged
    begins = np.array([span.place.start for span in piece.spans], np.int64) // itemsize
    edges = np.append(np.searchsorted(positions, begins), positions.size)
    segments = {
        number: [
            slice(span.place.start + part.start, span.place.start + part.stop)
            for part in delta.segments(_length(span.place))
        ]
        for number in np.flatnonzero(edges[:-1] < edges[1:]).tolist()
        for span in [piece.spans[number]]
    }
    starts = np.array([place.start for places in segments.values() for place in places], np.int64) // itemsize
    edges = np.append(np.searchsorted(positions, starts), positions.size)
    # a gap counts from the beginning of its segment
    begun = np.flatnonzero(edges[:-1] < edges[1:])
    at = edges[begun]
    gaps = positions[at] - starts[begun]
    for number, plane in enumerate(planes[: delta.GAP_PLANES]):
        plane[at] = (gaps >> (8 * number)) & 0xFF
    within = itertools.pairwise(edges.tolist())
    changed = []
    for number, span in enumerate(piece.spans):
        if number not in segments:
            same = [delta.NOTHING] * -(-_length(span.place) // delta.SEGMENT_BYTES)
            changed.append(_SpanChange(same, None))
            continue
        places = segments[number]
        parts = list(itertools.islice(within, len(places)))
        encoded = [
            _encode_segment(old, place, positions[start:end], differences[start:end], planes[:, start:end])
            for place, (start, end) in zip(places, parts, strict=True)
        ]
        changed.append(_SpanChange(encoded, None))
    return changed


def _encode_segment(
    old: torch.Tensor,
    place: slice,
    positions: npt.NDArray[np.int32],
    differences: npt.NDArray[Any],
    planes: npt.NDArray[np.uint8],
) -> bytes:
    """Return the encoded segment at ``place`` in a piece. ``positions``: the changed elements' indices in the piece."""
    itemsize, nbytes = differences.itemsize, _length(place)
    if not positions.size:
        return delta.NOTHING
    encoded = delta.encode_planes(planes, nbytes) if delta.is_sparse(positions.size, itemsize, nbytes) else None
    if encoded is None:
        new = bytearray(view_of(old[place]))
        np.frombuffer(new, differences.dtype)[positions - place.start // itemsize] += differences
        encoded = delta.encode_whole(memoryview(new))
    return encoded


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length
