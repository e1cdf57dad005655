"""Pieces and batches of the tensors that a GPU compares. What it finds in them: test_compare.py."""

import torch

from rollout_service.client import _gpu_compare, _pieces
from rollout_service.client._gpu_compare import runs_of
from rollout_service.client._pieces import Piece, batches_of, pieces_of
from rollout_service.client._tensors import describe


def test_many_changes_are_read_in_several_runs_of_pieces_of_one_size(monkeypatch):
    monkeypatch.setattr(_gpu_compare, "MOST_CHANGES", 30)
    sizes = [4, 4, 1, 1, 1, 1, 1]
    counts = [3, 5, 20, 10, 1, 26, 5]
    pieces = [Piece(size, 100, False, ()) for size in sizes]
    # of the piece with 26 changes of 100 elements all bytes are compared by threads
    assert runs_of(pieces, counts) == [slice(0, 2), slice(2, 4), slice(4, 5), slice(6, 7)]


def test_batches_have_every_piece_once_where_its_numbers_may_lie(monkeypatch):
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


def test_pieces_have_every_byte_once_and_come_in_the_order_of_their_last_tensors(monkeypatch):
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
