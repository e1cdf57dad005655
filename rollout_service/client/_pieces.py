"""The tensors of a table, cut and joined into pieces that are compared at once. Needs no torch.

A matrix of codes has few MB, an expert's scales a few bytes, and a vocabulary's embedding a GB. Neither do 40 000 small
tensors take a call each to a GPU or a thread, nor does a large one take its size in memory while it is compared.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rollout_service.protocol.delta import SEGMENT_BYTES
from rollout_service.protocol.delta_parts import tensors_of_parts
from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor

PIECE_BYTES = 2 * SEGMENT_BYTES
"""Of a tensor that is larger, pieces hold whole segments."""

BATCH_BYTES = 4 * PIECE_BYTES
"""Of pieces that a GPU compares at once. It is waited for once for each batch; each takes up to four times as much of
its memory, see ``rollout_service.client._gpu_compare``."""

CONVERTED_BYTES = 2 * BATCH_BYTES
"""Of a trainer's tensors that are quantized at once. To queue that takes a fraction of a millisecond each time."""


class Span(NamedTuple):
    """Bytes of a tensor, and where they are in a piece."""

    tensor: int
    """Its place in the table."""
    part: slice
    """Of the tensor's bytes."""
    place: slice
    """In the piece."""


class Piece(NamedTuple):
    """Tensors whose elements have one size, one after the other, or a part of a single one."""

    itemsize: int
    nbytes: int
    is_part: bool
    """Of a tensor, that other pieces have the rest of."""
    spans: tuple[Span, ...]

    @property
    def last(self) -> int:
        """The last of its tensors, by its place in the table."""
        return self.spans[-1].tensor


class Batch(NamedTuple):
    """Pieces that come one after the other, in one stretch of memory."""

    nbytes: int
    last: int
    """The last of its pieces, by its place among all."""
    pieces: tuple[int, ...]
    """Those of larger elements first, so that each lies where numbers of its size may; otherwise in their order."""
    places: tuple[slice, ...]
    """The bytes of each."""


def pieces_of(table: tuple[UploadTensor, ...]) -> list[Piece]:
    """All tensors, in the order in which the last tensor of each piece comes. Tensors without a byte are in none.

    No piece has tensors of two parts of a delta: a part is sent once all of its tensors are compared.
    """
    found: list[Piece] = []
    for tensors in tensors_of_parts([tensor.nbytes for tensor in table]):
        open_: dict[int, list[Span]] = {}
        for number in tensors:
            tensor = table[number]
            if tensor.nbytes > PIECE_BYTES:
                found += _cut(number, tensor)
            elif tensor.nbytes:
                itemsize = DTYPE_BYTES[tensor.dtype]
                spans = open_.setdefault(itemsize, [])
                if spans and spans[-1].place.stop + tensor.nbytes > PIECE_BYTES:
                    found.append(_joined(itemsize, spans))
                    spans = open_[itemsize] = []
                start = spans[-1].place.stop if spans else 0
                spans.append(Span(number, slice(0, tensor.nbytes), slice(start, start + tensor.nbytes)))
        found += [_joined(itemsize, spans) for itemsize, spans in open_.items() if spans]
    return sorted(found, key=lambda piece: piece.last)


def batches_of(pieces: Sequence[Piece]) -> list[Batch]:
    """All pieces, in order, in batches of ``BATCH_BYTES``, or of a single larger one."""
    found: list[list[int]] = []
    nbytes = 0
    for index, piece in enumerate(pieces):
        if not found or nbytes + piece.nbytes > BATCH_BYTES:
            found.append([])
            nbytes = 0
        found[-1].append(index)
        nbytes += piece.nbytes
    return [_batch(pieces, some) for some in found]


def _batch(pieces: Sequence[Piece], some: list[int]) -> Batch:
    ordered = sorted(some, key=lambda index: -pieces[index].itemsize)
    ends = list(itertools.accumulate(pieces[index].nbytes for index in ordered))
    return Batch(ends[-1], some[-1], tuple(ordered), tuple(map(slice, [0, *ends], ends)))


def _cut(number: int, tensor: UploadTensor) -> Iterator[Piece]:
    for start in range(0, tensor.nbytes, PIECE_BYTES):
        part = slice(start, min(start + PIECE_BYTES, tensor.nbytes))
        nbytes = part.stop - part.start
        yield Piece(DTYPE_BYTES[tensor.dtype], nbytes, True, (Span(number, part, slice(0, nbytes)),))


def _joined(itemsize: int, spans: list[Span]) -> Piece:
    return Piece(itemsize, spans[-1].place.stop, False, tuple(spans))
