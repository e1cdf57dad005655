"""What a GPU finds to have changed, here on the CPU and in Triton's interpreter, is what threads find and encode."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rollout_service.client import _gpu_compare, _pieces
from rollout_service.client._compare import Elements, _compare_piece, _encode, _SpanChange, view_of
from rollout_service.client._gpu_compare import Counting, queue_count, queue_search, runs_of
from rollout_service.client._pieces import Piece, batches_of, pieces_of
from rollout_service.client._tensors import describe
from rollout_service.protocol import delta
from rollout_service.protocol.upload import UploadTensor
from rollout_service.runtime.views import SIGNED, bytes_of

DTYPES = [torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float32]


def pair(dtype: torch.dtype, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of 10 000 elements, and of others of which a share differs."""
    generator = torch.Generator().manual_seed(1)
    old = bytes_of(torch.empty(10_000, dtype=dtype)).random_(0, 256, generator=generator)
    new, itemsize = old.clone(), dtype.itemsize
    for at in torch.randperm(10_000, generator=generator)[: int(share * 10_000)].tolist():
        new[at * itemsize + at % itemsize] += 1 + at % 255
    return old, new


def piece_of(flat: torch.Tensor, itemsize: int) -> Piece:
    """All of it, as three tensors."""
    dtype = {1: "int8", 2: "bfloat16", 4: "float32"}[itemsize]
    sizes = [3, flat.nbytes // itemsize - 1003, 1000]
    (piece,) = pieces_of(tuple(UploadTensor(name=str(size), dtype=dtype, shape=(size,)) for size in sizes))
    return piece


def counted(pieces: Sequence[Piece], old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> Counting:
    """Of a single batch."""
    (batch,) = batches_of(pieces)
    ordered = [pieces[index] for index in batch.pieces]
    there = torch.cat([old[index] for index in batch.pieces])
    spans = [[new[index][span.place] for span in pieces[index].spans] for index in batch.pieces]
    return queue_count(batch, ordered, there, spans)


def encoded(piece: Piece, old: torch.Tensor, new: torch.Tensor) -> list[_SpanChange]:
    """By what a GPU finds in it."""
    counts = counted([piece], [old], [new])
    (count,) = counts.counts()
    changes = queue_search(counts.differences.view(SIGNED[piece.itemsize]), count)
    return _encode(old, changes, slice(0, count), 0, piece)


def listed(elements: Elements | None) -> list[tuple[int, int]] | None:
    """Positions, and differences as they wrap around."""
    if elements is None:
        return None
    unsigned = elements.differences.view(f"u{elements.differences.itemsize}")
    return list(zip(elements.positions.tolist(), unsigned.tolist(), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0, 0.001, 0.02, 0.24])
@pytest.mark.parametrize("segment_bytes", [8 << 20, 512])
def test_what_a_gpu_finds_is_encoded_as_the_comparison_of_threads(
    dtype: torch.dtype, share: float, segment_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "SEGMENT_BYTES", segment_bytes)
    old, new = pair(dtype, share)
    piece = piece_of(new, dtype.itemsize)
    of_gpu = encoded(piece, old, new)
    of_threads = _compare_piece(old, [new[span.place] for span in piece.spans], piece)
    assert [change.segments for change in of_gpu] == [change.segments for change in of_threads]
    assert [listed(change.elements) for change in of_gpu] == [listed(change.elements) for change in of_threads]
    for change, span in zip(of_gpu, piece.spans, strict=True):
        made = old[span.place].clone()
        delta.apply(memoryview(b"".join(change.segments)), view_of(made), dtype.itemsize)
        assert made.equal(new[span.place])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_segment_of_which_too_much_changes_is_encoded_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "SEGMENT_BYTES", 512)
    old, new = pair(dtype, 0.01)
    piece = piece_of(new, dtype.itemsize)
    new[512 + 3 * dtype.itemsize : 1024] += 1
    span = encoded(piece, old, new)[1]
    place = piece.spans[1].place
    assert span.segments[1] == delta.encode_whole(view_of(new[place][512:1024])) and span.elements is None
    assert all(len(segment) < 512 for segment in [span.segments[0], *span.segments[2:]])


def test_many_changes_are_read_in_several_runs_of_pieces_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu_compare, "MOST_CHANGES", 30)
    sizes = [4, 4, 1, 1, 1, 1, 1]
    counts = [3, 5, 20, 10, 1, 26, 5]
    pieces = [Piece(size, 100, False, ()) for size in sizes]
    # of the piece with 26 changes of 100 elements all bytes are compared by threads
    assert runs_of(pieces, counts) == [slice(0, 2), slice(2, 4), slice(4, 5), slice(6, 7)]


def test_a_run_is_encoded_as_its_pieces_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "SEGMENT_BYTES", 4096)
    pairs = [pair(dtype, share) for dtype, share in [(torch.int8, 0.02), (torch.float32, 0.1), (torch.int8, 0.0)]]
    pairs.append((pairs[0][1], pairs[0][0]))
    pieces = [piece_of(old, itemsize) for (old, _), itemsize in zip(pairs, [1, 4, 1, 1], strict=True)]
    both = counted(pieces, *zip(*pairs, strict=True))
    counts = both.counts()
    assert (both.batch.pieces, counts) == ((1, 0, 2, 3), [1000, 200, 0, 200])
    begin = both.batch.places[1].start
    run = queue_search(both.differences[begin:].view(torch.int8), sum(counts[1:]))
    ends = np.cumsum([0, *counts[1:]]).tolist()
    for number, index in enumerate(both.batch.pieces[1:]):
        changes = slice(ends[number], ends[number + 1])
        old, new = pairs[index]
        made = _encode(old, run, changes, 10_000 * number, pieces[index])
        expected = _compare_piece(old, [new[span.place] for span in pieces[index].spans], pieces[index])
        assert [change.segments for change in made] == [change.segments for change in expected]


def test_batches_have_every_piece_once_where_its_numbers_may_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pieces, "BATCH_BYTES", 100)
    pieces = [Piece(size, nbytes, False, ()) for size, nbytes in [(1, 33), (4, 40), (2, 22), (1, 200), (1, 7), (4, 8)]]
    batches = batches_of(pieces)
    assert [(batch.pieces, batch.last, batch.nbytes) for batch in batches] == [
        ((1, 2, 0), 2, 95), ((3,), 3, 200), ((5, 4), 5, 15)
    ]  # fmt: skip
    for batch in batches:
        assert [place.stop - place.start for place in batch.places] == [pieces[index].nbytes for index in batch.pieces]
        assert [place.start for place in batch.places] == [0, *(place.stop for place in batch.places[:-1])]
        for index, place in zip(batch.pieces, batch.places, strict=True):
            assert place.start % pieces[index].itemsize == 0


def test_pieces_have_every_byte_once_and_come_in_the_order_of_their_last_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_pieces, "PIECE_BYTES", 128)
    shapes = [("a", torch.int8, 100), ("b", torch.float32, 3), ("c", torch.int8, 20), ("d", torch.int8, 20),
              ("e", torch.bfloat16, 300), ("f", torch.float32, 3), ("g", torch.int8, 0)]  # fmt: skip
    table = tuple(describe(name, torch.empty(size, dtype=dtype)) for name, dtype, size in shapes)
    pieces = pieces_of(table)
    assert [piece.last for piece in pieces] == sorted(piece.last for piece in pieces)
    covered = dict.fromkeys(range(len(table)), 0)
    for piece in pieces:
        place = 0
        for span in piece.spans:
            assert (span.part.start, span.place.start) == (covered[span.tensor], place)
            covered[span.tensor], place = span.part.stop, span.place.stop
        assert place == piece.nbytes <= 128
    assert [covered[number] for number in range(len(table))] == [tensor.nbytes for tensor in table]
    assert {tuple(table[span.tensor].name for span in piece.spans) for piece in pieces} == {
        ("a", "c"), ("d",), ("b", "f"), ("e",)
    }  # fmt: skip
