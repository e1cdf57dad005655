"""The tensors of a table, split and joined into pieces that are compared together. Needs no torch.

Tensors differ in size: a code matrix has a few MB, an expert's scales a few bytes, an embedding a GB. Pieces save a
kernel or a thread's job for each of 40 000 small tensors, and bound the memory for large ones.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from rollout_service.protocol.delta import SEGMENT_BYTES
from rollout_service.protocol.delta_parts import tensors_of_parts
from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor
from rollout_service.runtime.groups import groups_of

PIECE_BYTES = 2 * SEGMENT_BYTES
"""Maximum size of a piece in bytes. Pieces of a larger tensor hold whole segments."""

BATCH_BYTES = 4 * PIECE_BYTES
"""Maximum bytes of the pieces that a GPU compares together, with one synchronization per batch. The GPU memory needed
is up to four times as large, see ``rollout_service.client._gpu_compare``."""

CONVERTED_BYTES = 2 * BATCH_BYTES
"""Maximum bytes of a trainer's tensors that are quantized together. Queueing one batch takes less than a
millisecond."""


class Span(NamedTuple):
    """A byte range of a tensor, and its place in a piece."""

    tensor: int
    """Index of the tensor in the table."""
    part: slice
    """Byte range in the tensor."""
    place: slice
    """Byte range in the piece."""


class Piece(NamedTuple):
    """Consecutive tensors with one element size, or a part of a single large tensor."""

    itemsize: int
    nbytes: int
    is_part: bool
    """True if the piece is a part of a tensor that continues in other pieces."""
    spans: tuple[Span, ...]

    @property
    def last(self) -> int:
        """Table index of the last tensor in the piece."""
        return self.spans[-1].tensor


class Batch(NamedTuple):
    """Consecutive pieces in one contiguous memory."""

    nbytes: int
    last: int
    """Index of the last piece."""
    pieces: tuple[int, ...]
    """Indices of the pieces. Larger elements come first so that every piece is aligned; otherwise the order is
    unchanged."""
    places: tuple[slice, ...]
    """Byte range of each piece in the batch."""


def pieces_of(table: tuple[UploadTensor, ...]) -> list[Piece]:
    """Return all tensors as pieces, in the order of each piece's last tensor. Empty tensors are in no piece.

    A piece never spans two parts of a delta, because a part is sent once all of its tensors are compared.
    """
    found: list[Piece] = []
    for tensors in tensors_of_parts([tensor.nbytes for tensor in table]):
        open_: dict[int, list[Span]] = {}
        for number in tensors:
            tensor, itemsize = table[number], DTYPE_BYTES[table[number].dtype]
            if tensor.nbytes > PIECE_BYTES:
                for start in range(0, tensor.nbytes, PIECE_BYTES):
                    part = slice(start, min(start + PIECE_BYTES, tensor.nbytes))
                    nbytes = part.stop - part.start
                    found.append(Piece(itemsize, nbytes, True, (Span(number, part, slice(0, nbytes)),)))
            elif tensor.nbytes:
                spans = open_.setdefault(itemsize, [])
                if spans and spans[-1].place.stop + tensor.nbytes > PIECE_BYTES:
                    found.append(_join_spans(itemsize, spans))
                    spans = open_[itemsize] = []
                start = spans[-1].place.stop if spans else 0
                spans.append(Span(number, slice(0, tensor.nbytes), slice(start, start + tensor.nbytes)))
        found += [_join_spans(itemsize, spans) for itemsize, spans in open_.items() if spans]
    return sorted(found, key=lambda piece: piece.last)


def batches_of(pieces: Sequence[Piece]) -> list[Batch]:
    """Return all pieces in order, in batches of at most ``BATCH_BYTES``, or of a single larger piece."""
    batches = []
    for some in groups_of(range(len(pieces)), lambda index: pieces[index].nbytes, BATCH_BYTES):
        ordered = sorted(some, key=lambda index: -pieces[index].itemsize)
        ends = list(itertools.accumulate(pieces[index].nbytes for index in ordered))
        batches.append(Batch(ends[-1], some[-1], tuple(ordered), tuple(map(slice, [0, *ends], ends))))
    return batches


def _join_spans(itemsize: int, spans: list[Span]) -> Piece:
    return Piece(itemsize, spans[-1].place.stop, False, tuple(spans))
