"""Which bytes of a version's tensors lie where in a staging area. Needs neither torch nor vllm.

Before a worker knows what its copies read, the area holds whole tensors. Afterwards it holds blocks: the rows, or parts
of rows, that a rank of a tensor-parallel engine copies, packed together, so that the area is as large as its shard.
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

from rollout_service.protocol.tensors import STORED_DTYPE_BYTES
from rollout_service.store.manifest import Chunk, Manifest, StoredTensor
from rollout_service.store.reading import Piece

ALIGNMENT_BYTES = 16
"""Of each block; copies of whole such units are the fastest."""


class Span(NamedTuple):
    """``rows`` runs of ``row_bytes`` of one tensor, the first of them at ``start``, each ``stride_bytes`` further."""

    tensor: str
    start: int
    row_bytes: int
    rows: int = 1
    stride_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in it."""
        return self.row_bytes * self.rows

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.start + (self.rows - 1) * self.stride_bytes + self.row_bytes


class Move(NamedTuple):
    """Rows from the memory of a piece into the area, where they lie one after the other."""

    source: int
    """First byte in the piece."""
    target: int
    """First byte in the area."""
    row_bytes: int
    rows: int
    stride_bytes: int


class Placement:
    """Where in the area each span of a version begins."""

    def __init__(self, spans: Iterable[Span]) -> None:
        """``spans`` in the order in which they shall lie; equal ones lie once."""
        self.places: dict[Span, int] = {}
        self.nbytes = 0
        """Size of the area that it takes."""
        self._of_tensor: dict[str, list[Span]] = {}
        self._moves: WeakKeyDictionary[Piece, list[Move]] = WeakKeyDictionary()
        for span in spans:
            if span not in self.places:
                self.places[span] = self.nbytes
                self.nbytes += -(-span.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                self._of_tensor.setdefault(span.tensor, []).append(span)

    @classmethod
    def whole(cls, manifest: Manifest) -> "Placement":
        """Every tensor."""
        return cls(whole_span(tensor) for tensor in manifest.in_order())

    @cached_property
    def digest(self) -> str:
        """Equal for placements of equal spans at equal places."""
        return hashlib.sha256(repr(list(self.places.items())).encode()).hexdigest()

    def chunks(self, manifest: Manifest, *, every: bool) -> Iterator[tuple[StoredTensor, Chunk]]:
        """The chunks that hold its bytes, or all of the version's, in the order of the files."""
        for tensor in manifest.in_order():
            spans = self._of_tensor.get(tensor.name, [])
            for chunk in tensor.chunks():
                if every or any(_part(span, chunk.start, chunk.start + chunk.nbytes) for span in spans):
                    yield tensor, chunk

    def moves(self, piece: Piece) -> list[Move]:
        """What of a piece goes where in the area; runs that follow each other on both sides are one."""
        if (known := self._moves.get(piece)) is None:
            known = self._moves[piece] = self._moves_of(piece)
        return known

    def _moves_of(self, piece: Piece) -> list[Move]:
        moves: list[Move] = []
        for tensor, start, end in _stretches(piece):
            for span in self._of_tensor.get(tensor.name, []):
                for part, done in _part(span, start, end):
                    source = tensor.offset - piece.offset + part.start
                    move = Move(source, self.places[span] + done, part.row_bytes, part.rows, part.stride_bytes)
                    last = moves[-1] if moves else None
                    if last is not None and _follows(last, move):
                        moves[-1] = last._replace(row_bytes=last.row_bytes + move.row_bytes)
                    else:
                        moves.append(move)
        return moves


def whole_span(tensor: StoredTensor) -> Span:
    """All of a tensor."""
    return Span(tensor.name, 0, tensor.nbytes)


def batches(tensors: Iterable[StoredTensor], most_bytes: int) -> Iterator[Piece]:
    """Whole tensors, in the order of their files, to be read at once and viewed where they lie.

    A tensor whose elements would not be aligned begins a piece of its own; so does what exceeds ``most_bytes``.
    """
    group: list[StoredTensor] = []
    for tensor in tensors:
        if group and not _may_join(group, tensor, most_bytes):
            yield _batch(group)
            group = []
        group.append(tensor)
    if group:
        yield _batch(group)


def _may_join(group: list[StoredTensor], tensor: StoredTensor, most_bytes: int) -> bool:
    first, last = group[0], group[-1]
    return (
        (tensor.file, tensor.offset) == (last.file, last.offset + last.nbytes)
        and tensor.offset + tensor.nbytes - first.offset <= most_bytes
        and (tensor.offset - first.offset) % STORED_DTYPE_BYTES[tensor.dtype] == 0
    )


def _batch(group: list[StoredTensor]) -> Piece:
    first, last = group[0], group[-1]
    chunks = tuple((tensor, chunk) for tensor in group for chunk in tensor.chunks())
    return Piece(first.file, first.offset, last.offset + last.nbytes - first.offset, chunks)


def _stretches(piece: Piece) -> Iterator[tuple[StoredTensor, int, int]]:
    """Each tensor of a piece, and from where to where the piece holds it."""
    current: tuple[StoredTensor, int, int] | None = None
    for tensor, chunk in piece.chunks:
        if current is not None and current[0] is tensor:
            current = tensor, current[1], chunk.start + chunk.nbytes
            continue
        if current is not None:
            yield current
        current = tensor, chunk.start, chunk.start + chunk.nbytes
    if current is not None:
        yield current


def _part(span: Span, start: int, end: int) -> list[tuple[Span, int]]:
    """What of a span lies in bytes ``[start, end)`` of its tensor, and how many of its bytes come before each part.

    At most three parts: the end of a row, whole rows, the beginning of a row.
    """
    if span.end <= start or end <= span.start:
        return []
    if span.rows == 1:
        first, last = max(span.start, start), min(span.end, end)
        return [(Span(span.tensor, first, last - first), first - span.start)]
    parts: list[tuple[Span, int]] = []
    # rows that begin in [start, end), and of those the ones that end there
    begins = max(0, -(-(start - span.start) // span.stride_bytes))
    beyond = min(span.rows, -(-(end - span.start) // span.stride_bytes))
    whole = min(beyond, max(0, (end - span.start - span.row_bytes) // span.stride_bytes + 1))
    rows = [(begins - 1, begins)] if 0 < begins <= span.rows else []
    rows += [(begins, whole)] if begins < whole else []
    rows += [(max(begins, whole), beyond)] if max(begins, whole) < beyond else []
    for first, last in rows:
        row = span.start + first * span.stride_bytes
        if last - first > 1 or (row >= start and row + span.row_bytes <= end):
            parts.append(
                (Span(span.tensor, row, span.row_bytes, last - first, span.stride_bytes), first * span.row_bytes)
            )
            continue
        low, high = max(row, start), min(row + span.row_bytes, end)
        if low < high:
            parts.append((Span(span.tensor, low, high - low), first * span.row_bytes + low - row))
    return parts


def _follows(last: Move, move: Move) -> bool:
    return last.rows == move.rows == 1 and (last.source + last.row_bytes, last.target + last.row_bytes) == (
        move.source,
        move.target,
    )
