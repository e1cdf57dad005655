"""What changes from one version to the next: found by threads, or on the GPU that holds the new tensors.

From a GPU come positions, differences and digests; of the new bytes only those of segments that have changed too much.
The old bytes come from the host, before the comparison that needs them. On the GPU that takes some five times the bytes
of a piece, and ``AT_ONCE_BYTES`` until what was found there is encoded.

Positions and differences are kept beside their encoding, as ``Changed.elements``, if they are few: with them the old
bytes become the new ones without a decoding.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from rollout_service.client._pieces import Piece
from rollout_service.protocol import delta
from rollout_service.store.manifest import CHUNK_BYTES, DIGEST_BYTES, joined_digests, tensor_digests
from rollout_service.threads import io_threads

logger = logging.getLogger("rollout_service.client")

AT_ONCE_BYTES = 256 << 20
"""Of pieces that are being compared: one for each thread, and as much as the memory that this takes may be."""

ELEMENTS_SHARE = 1 / 16
"""Of all bytes, that ``Changed.elements`` of one comparison may have. After one step of a trainer they have 1 to 3%."""

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Elements(NamedTuple):
    """Of a piece, that changed."""

    positions: npt.NDArray[np.int32]
    """Ascending, in the piece."""
    differences: npt.NDArray[Any]
    """New bits minus old bits, which wrap around; of an integer dtype of the elements' size."""

    @property
    def nbytes(self) -> int:
        """Memory that they have."""
        return self.positions.nbytes + self.differences.nbytes


@dataclass(frozen=True, slots=True)
class Changed:
    """One tensor that is not what it was."""

    encoded: bytes
    """What changed, see ``rollout_service.protocol.delta``."""
    digest: str
    """That the tensor has now, as ``StoredTensor.digest``."""
    elements: tuple[Elements, ...] | None = field(default=None, compare=False, repr=False)
    """The same, of each of the tensor's spans; None: it is only in ``encoded``."""


class NewBytes(Protocol):
    """Of tensors, one after the other, or of a part of one."""

    @property
    def data(self) -> memoryview:
        """In the host's memory."""

    def digest(self, place: slice) -> str:
        """Of a whole tensor, as ``StoredTensor.digest``."""


class HostBytes:
    """Those that the host has."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def digest(self, place: slice) -> str:
        """See ``NewBytes``."""
        return digest_of(self.data[place])


class GpuBytes:
    """Those that the current stream has made, in a GPU's memory, where they are hashed."""

    def __init__(self, flat: torch.Tensor, tensors: Sequence[slice]) -> None:
        """``tensors``: whose digests will be asked for."""
        from rollout_service.quant.digests import Hashing, Run  # needs triton

        self._flat = flat
        self._starts = [start for place in tensors for start in range(place.start, place.stop, CHUNK_BYTES)]
        ends = [min(start + CHUNK_BYTES, place.stop) for place in tensors
                for start in range(place.start, place.stop, CHUNK_BYTES)]  # fmt: skip
        self._ends = ends
        runs = [Run(flat.data_ptr() + start, end - start) for start, end in zip(self._starts, ends, strict=True)]
        self._hashing = Hashing([runs], flat.device)
        self._hashing.queue(0)
        # or whoever reads them would wait for all that the stream was given since
        self._hashing.collect()
        self._hashed = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None

    @functools.cached_property
    def data(self) -> memoryview:
        """See ``NewBytes``: copied when it is first asked for."""
        self._wait()
        return view_of(self._flat.cpu())

    def digest(self, place: slice) -> str:
        """See ``NewBytes``."""
        first = bisect.bisect_left(self._starts, place.start)
        count = -(-_length(place) // CHUNK_BYTES)
        return joined_digests(self._digests[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES])[0]

    @functools.cached_property
    def _digests(self) -> bytes:
        self._wait()
        return self._hashing.read(lambda number: self.data[self._starts[number] : self._ends[number]])

    def _wait(self) -> None:
        if self._hashed is not None:
            self._hashed.synchronize()


@dataclass(frozen=True, slots=True)
class _SpanChange:
    segments: list[bytes]
    """Encoded, in order."""
    digest: str | None
    """Of the new tensor; None: nothing has changed in it, or the span is not all of it."""
    elements: Elements | None = field(compare=False, repr=False)
    """None: there are so many that segments are sent as a whole."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes (row-major) as uint8 [N] on its device; no copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def view_of(flat: torch.Tensor) -> memoryview:
    """The bytes of uint8 [N] on the CPU, without a copy."""
    data: memoryview = flat.numpy().data
    return data


def digest_of(data: memoryview) -> str:
    """As ``StoredTensor.digest``."""
    return tensor_digests(data)[0]


def changed_elements(old: torch.Tensor, new: torch.Tensor, itemsize: int) -> Elements | None:
    """Where two uint8 [N] on one device differ; None: in so many elements that all bytes are fewer than these."""
    was, now = old.view(_SIGNED[itemsize]), new.view(_SIGNED[itemsize])
    differs = was.ne(now)
    if int(differs.count_nonzero()) > delta.SPARSE * now.numel():
        return None
    at = differs.nonzero().squeeze(1)
    positions, differences = at.to(torch.int32), now[at] - was[at]
    return Elements(positions.cpu().numpy(), differences.cpu().numpy())


class Comparison:
    """Of the tensors of a new version with the ``kept`` pieces of the old one. A context manager, for one thread."""

    def __init__(self, pieces: Sequence[Piece], kept: Sequence[torch.Tensor]) -> None:
        """``pieces``: as of ``pieces_of``. ``kept``: uint8, on the CPU."""
        self._pieces, self._kept = pieces, kept
        self._next = 0
        self._gpus: dict[torch.device, _Gpu] = {}
        self._pool = ThreadPoolExecutor(io_threads(), "delta")
        self._compared: deque[tuple[Piece, Future[list[_SpanChange]]]] = deque()
        self._segments: dict[int, list[bytes]] = defaultdict(list)
        self._elements: dict[int, list[Elements | None]] = defaultdict(list)
        self._elements_bytes = 0
        self._most_elements_bytes = ELEMENTS_SHARE * sum(each.nbytes for each in kept)
        self._digests: dict[int, Callable[[], str]] = {}
        self.waiting: dict[int, torch.Tensor] = {}
        """Tensors that were added and are compared once the last one of their piece is."""
        self.changed_bytes = 0
        """Of what was found so far, encoded."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, number: int, flat: torch.Tensor) -> None:
        """The new bytes, uint8 [N], of the next tensor of the table, at that place in it."""
        if flat.nbytes:
            self.waiting[number] = flat
        begun: set[int] = set()
        while self._next < len(self._pieces) and self._pieces[self._next].last == number:
            self._begin(self._next)
            begun |= {span.tensor for span in self._pieces[self._next].spans}
            self._next += 1
        for tensor in begun:
            del self.waiting[tensor]

    def finish(self) -> dict[int, Changed | None]:
        """What became of the tensors that were compared, by their places in the table."""
        while self._compared:
            self._take_first()
        found: dict[int, Changed | None] = {}
        for tensor, segments in self._segments.items():
            encoded = delta.joined(segments)
            elements = [each for each in self._elements[tensor] if each is not None]
            all_of_them = tuple(elements) if len(elements) == len(self._elements[tensor]) else None
            found[tensor] = Changed(encoded, self._digests[tensor](), all_of_them) if encoded else None
        return found

    def _begin(self, index: int) -> None:
        piece = self._pieces[index]
        while self._compared and sum(each.nbytes for each, _ in self._compared) + piece.nbytes > AT_ONCE_BYTES:
            self._take_first()
        flats = [self.waiting[span.tensor][span.part] for span in piece.spans]
        work: Callable[[], list[_SpanChange]] | None = None
        if flats[0].is_cuda and len({flat.device for flat in flats}) == 1:
            try:
                work = self._found_on_gpu(index, flats)
            except torch.cuda.OutOfMemoryError as error:
                logger.warning("what has changed is looked for on the CPU, since the GPU has no room: %s", error)
        if work is None:
            if piece.is_part:
                self._begin_digest(piece.spans[0].tensor)
            work = partial(_compared, self._kept[index], [flat.cpu() for flat in flats], piece)
        self._compared.append((piece, self._pool.submit(work)))

    def _found_on_gpu(self, index: int, flats: list[torch.Tensor]) -> Callable[[], list[_SpanChange]]:
        """Compare in the current stream; what is left to do for a thread."""
        piece, gpu = self._pieces[index], self._gpu(flats[0].device)
        old = gpu.uploaded(index, self._kept[index])
        if index + 1 < len(self._pieces):
            gpu.upload(index + 1, self._kept[index + 1])
        new = flats[0] if len(flats) == 1 else torch.cat(flats)
        elements = changed_elements(old, new, piece.itemsize)
        if piece.is_part:
            self._begin_digest(piece.spans[0].tensor)
        places = [] if piece.is_part else [span.place for span in piece.spans]
        return partial(_encoded, elements, piece, GpuBytes(new, places))

    def _begin_digest(self, number: int) -> None:
        """Of a tensor in several pieces."""
        if number not in self._digests:
            flat, all_of_it = self.waiting[number], slice(0, self.waiting[number].nbytes)
            new: NewBytes = GpuBytes(flat, [all_of_it]) if flat.is_cuda else HostBytes(view_of(flat))
            self._digests[number] = self._pool.submit(new.digest, all_of_it).result

    def _gpu(self, device: torch.device) -> _Gpu:
        if device not in self._gpus:
            self._gpus[device] = _Gpu(device)
        return self._gpus[device]

    def _take_first(self) -> None:
        piece, future = self._compared.popleft()
        for span, change in zip(piece.spans, future.result(), strict=True):
            self._segments[span.tensor] += change.segments
            self.changed_bytes += sum(map(len, change.segments))
            self._elements[span.tensor].append(self._if_few(change.elements))
            if change.digest is not None:
                self._digests[span.tensor] = partial(str, change.digest)

    def _if_few(self, elements: Elements | None) -> Elements | None:
        if elements is None or self._elements_bytes + elements.nbytes > self._most_elements_bytes:
            return None
        self._elements_bytes += elements.nbytes
        return elements


class _Gpu:
    """Copies to one GPU, beside what is computed there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up = torch.cuda.Stream(device)
        self._uploads: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}

    def upload(self, index: int, kept: torch.Tensor) -> None:
        """Begin to copy a piece here."""
        if index in self._uploads:
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._up):
            copy = torch.empty(kept.nbytes, dtype=torch.uint8, device=self._device)
            copy.copy_(kept, non_blocking=True)
            self._uploads[index] = copy, self._up.record_event()

    def uploaded(self, index: int, kept: torch.Tensor) -> torch.Tensor:
        """A piece here, for the current stream."""
        self.upload(index, kept)
        copy, done = self._uploads.pop(index)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        copy.record_stream(current)
        return copy


def _compared(old: torch.Tensor, new: list[torch.Tensor], piece: Piece) -> list[_SpanChange]:
    """A piece on the CPU, span by span."""
    found = []
    for span, flat in zip(piece.spans, new, strict=True):
        was, now = view_of(old[span.place]), view_of(flat)
        segments, elements = _compared_span(was, now, piece.itemsize, span.place.start // piece.itemsize)
        found.append(_change(piece, segments, elements, partial(digest_of, now)))
    return found


def _compared_span(was: memoryview, now: memoryview, itemsize: int, first: int) -> tuple[list[bytes], Elements | None]:
    """``first``: its place in the piece, in elements."""
    segments: list[bytes] = []
    positions: list[npt.NDArray[np.int32]] = []
    differences: list[delta.Array] = []
    is_whole = False
    places = list(delta.segments(now.nbytes))
    if delta.is_small_and_equal(was, now):
        return [delta.NOTHING] * len(places), _elements_of(positions, differences, itemsize)
    for place in places:
        at, by = delta.changed_elements(was[place], now[place], itemsize)
        encoded = delta.encode_changes(at, by, _length(place))
        if encoded is None:
            is_whole, encoded = True, delta.encode_whole(now[place])
        elif at.size:
            positions.append((at + (first + place.start // itemsize)).astype(np.int32))
            differences.append(by)
        segments.append(encoded)
    return segments, None if is_whole else _elements_of(positions, differences, itemsize)


def _elements_of(positions: list[npt.NDArray[np.int32]], differences: list[delta.Array], itemsize: int) -> Elements:
    if not positions:
        return Elements(np.empty(0, np.int32), np.empty(0, delta.UNSIGNED[itemsize]))
    if len(positions) == 1:
        return Elements(positions[0], differences[0])
    return Elements(np.concatenate(positions), np.concatenate(differences))


def _encoded(elements: Elements | None, piece: Piece, new: NewBytes) -> list[_SpanChange]:
    """A piece of which it is known where it has changed, span by span."""
    found = []
    for span, within in zip(piece.spans, _of_spans(elements, piece), strict=True):
        places = [_within(span.place, part) for part in delta.segments(_length(span.place))]
        encoded: list[bytes | None] = [None] * len(places)
        if within is not None:
            encoded = _encoded_elements(within, places)
        segments = [
            delta.encode_whole(new.data[place]) if segment is None else segment
            for place, segment in zip(places, encoded, strict=True)
        ]
        found.append(_change(piece, segments, None if None in encoded else within, partial(new.digest, span.place)))
    return found


def _encoded_elements(elements: Elements, places: list[slice]) -> list[bytes | None]:
    """Each of the segments at these places in a piece; None: it is to be sent as a whole."""
    if not elements.positions.size:
        return [delta.NOTHING] * len(places)
    itemsize = elements.differences.itemsize
    starts = np.array([place.start for place in places], np.int64) // itemsize
    edges = [*np.searchsorted(elements.positions, starts).tolist(), elements.positions.size]
    return [
        delta.encode_changes(elements.positions[start:end] - first, elements.differences[start:end], _length(place))
        if start < end
        else delta.NOTHING
        for place, first, start, end in zip(places, starts.tolist(), edges, edges[1:], strict=False)
    ]


def _of_spans(elements: Elements | None, piece: Piece) -> list[Elements | None]:
    if elements is None or len(piece.spans) == 1:
        return [elements] * len(piece.spans)
    starts = np.array([span.place.start for span in piece.spans], np.int64) // piece.itemsize
    edges = [*np.searchsorted(elements.positions, starts).tolist(), elements.positions.size]
    return [
        Elements(elements.positions[start:end], elements.differences[start:end])
        for start, end in itertools.pairwise(edges)
    ]


def _change(piece: Piece, segments: list[bytes], elements: Elements | None, digest: Callable[[], str]) -> _SpanChange:
    changed = any(segment != delta.NOTHING for segment in segments)
    return _SpanChange(segments, digest() if changed and not piece.is_part else None, elements)


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _within(place: slice, part: slice) -> slice:
    return slice(place.start + part.start, place.start + part.stop)
