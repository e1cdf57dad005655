"""The layout of a version's bytes in a staging buffer. Needs neither torch nor vllm.

Until a worker knows which bytes its copies read, the buffer holds whole tensors. Afterwards it holds packed blocks: the
rows, or parts of rows, that a tensor-parallel rank copies. The buffer then has the size of the rank's shard.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

from rollout_service.store.manifest import Chunk, Manifest, StoredTensor
from rollout_service.store.reading import Piece

ALIGNMENT_BYTES = 16
"""Alignment of each block in bytes. Copies of whole units are the fastest."""


class Span(NamedTuple):
    """``rows`` ranges of ``row_bytes`` in one tensor, the first at ``start``, spaced by ``stride_bytes``."""

    tensor: str
    start: int
    row_bytes: int
    rows: int = 1
    stride_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes, without gaps."""
        return self.row_bytes * self.rows

    @property
    def end(self) -> int:
        """Offset after its last byte."""
        return self.start + (self.rows - 1) * self.stride_bytes + self.row_bytes


class Move(NamedTuple):
    """Rows to copy from a piece's memory to consecutive bytes of the staging buffer."""

    source: int
    """Offset of the first byte in the piece."""
    target: int
    """Offset of the first byte in the buffer."""
    row_bytes: int
    rows: int
    stride_bytes: int


class Placement:
    """The offset of each span in the staging buffer."""

    def __init__(self, spans: Iterable[Span]) -> None:
        """Place ``spans`` in the given order. Equal spans are placed once."""
        self.places: dict[Span, int] = {}
        self.nbytes = 0
        """Bytes of the buffer that are used."""
        self._of_tensor: dict[str, list[Span]] = {}
        self._moves: WeakKeyDictionary[Piece, list[Move]] = WeakKeyDictionary()
        for span in spans:
            if span not in self.places:
                self.places[span] = self.nbytes
                self.nbytes += -(-span.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                self._of_tensor.setdefault(span.tensor, []).append(span)

    @classmethod
    def whole(cls, manifest: Manifest) -> "Placement":
        """Return a placement of all tensors of a version."""
        return cls(whole_span(tensor) for tensor in manifest.in_order())

    def chunks(self, manifest: Manifest, *, every: bool) -> Iterator[tuple[StoredTensor, Chunk]]:
        """Yield the chunks that overlap the spans, or all chunks of the version, in file order."""
        for tensor in manifest.in_order():
            spans = self._of_tensor.get(tensor.name, [])
            for chunk in tensor.chunks():
                if every or any(_part(span, chunk.start, chunk.start + chunk.nbytes) for span in spans):
                    yield tensor, chunk

    def moves(self, piece: Piece) -> list[Move]:
        """Return the moves from a piece to the buffer. Ranges that are adjacent on both sides are coalesced."""
        if (known := self._moves.get(piece)) is None:
            known = self._moves[piece] = self._moves_of(piece)
        return known

    def _moves_of(self, piece: Piece) -> list[Move]:
        moves: list[Move] = []
        for tensor, start, end in _tensor_ranges(piece):
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
    """Return a span of a whole tensor."""
    return Span(tensor.name, 0, tensor.nbytes)


def _tensor_ranges(piece: Piece) -> Iterator[tuple[StoredTensor, int, int]]:
    """Yield each tensor of a piece with the byte range that the piece holds."""
    chunks, first = piece.chunks, 0
    for end in range(1, len(chunks) + 1):
        if end == len(chunks) or chunks[end][0] is not chunks[first][0]:
            (tensor, begin), (_, last) = chunks[first], chunks[end - 1]
            yield tensor, begin.start, last.start + last.nbytes
            first = end


def _part(span: Span, start: int, end: int) -> list[tuple[Span, int]]:
    """Return the parts of a span within bytes ``[start, end)`` of its tensor, each with its offset in the span.

    There are at most three parts: the end of a row, whole rows, the beginning of a row.
    """
    if span.end <= start or end <= span.start:
        return []
    if span.rows == 1:
        first, last = max(span.start, start), min(span.end, end)
        return [(Span(span.tensor, first, last - first), first - span.start)]
    parts: list[tuple[Span, int]] = []
    # rows that begin in [start, end), and the subset that also ends there
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
