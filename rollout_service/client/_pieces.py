"""The tensors of a table, cut and joined into pieces that are compared at once. Needs no torch.

A matrix of codes has few MB, an expert's scales a few bytes, and a vocabulary's embedding a GB. Neither do 40 000 small
tensors take a call each to a GPU or a thread, nor does a large one take its size in memory while it is compared.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rollout_service.protocol.delta import SEGMENT_BYTES
from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor

PIECE_BYTES = 4 * SEGMENT_BYTES
"""Of a tensor that is larger, pieces hold whole segments."""


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


def pieces_of(table: tuple[UploadTensor, ...]) -> list[Piece]:
    """All tensors, in the order in which the last tensor of each piece comes. Tensors without a byte are in none."""
    found: list[Piece] = []
    open_: dict[int, list[Span]] = {}
    for number, tensor in enumerate(table):
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


def _cut(number: int, tensor: UploadTensor) -> Iterator[Piece]:
    for start in range(0, tensor.nbytes, PIECE_BYTES):
        part = slice(start, min(start + PIECE_BYTES, tensor.nbytes))
        nbytes = part.stop - part.start
        yield Piece(DTYPE_BYTES[tensor.dtype], nbytes, True, (Span(number, part, slice(0, nbytes)),))


def _joined(itemsize: int, spans: list[Span]) -> Piece:
    return Piece(itemsize, spans[-1].place.stop, False, tuple(spans))
