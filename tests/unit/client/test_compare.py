"""What a GPU finds to have changed, here by the same operations on the CPU, is what threads find and encode."""

import pytest
import torch

from rollout_service.client import _pieces
from rollout_service.client._compare import (
    Elements,
    HostBytes,
    _compared,
    _encoded,
    bytes_of,
    changed_elements,
    view_of,
)
from rollout_service.client._pieces import Piece, pieces_of
from rollout_service.client._tensors import describe
from rollout_service.protocol import delta
from rollout_service.protocol.upload import UploadTensor

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0, 0.001, 0.02, 0.24])
@pytest.mark.parametrize("segment_bytes", [8 << 20, 512])
def test_positions_and_differences_are_encoded_as_the_comparison_of_threads(
    dtype: torch.dtype, share: float, segment_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "SEGMENT_BYTES", segment_bytes)
    old, new = pair(dtype, share)
    elements = changed_elements(old, new, dtype.itemsize)
    assert elements is not None and elements.positions.size == int(share * 10_000)
    piece = piece_of(new, dtype.itemsize)
    of_gpu = _encoded(elements, piece, HostBytes(view_of(new)))
    of_threads = _compared(old, [new[span.place] for span in piece.spans], piece)
    assert of_gpu == of_threads
    for change, span in zip(of_gpu, piece.spans, strict=True):
        made = old[span.place].clone()
        delta.apply(memoryview(b"".join(change.segments)), view_of(made), dtype.itemsize)
        assert made.equal(new[span.place])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_piece_of_which_too_much_changes_is_encoded_whole(dtype: torch.dtype) -> None:
    old, new = pair(dtype, 0.4)
    assert changed_elements(old, new, dtype.itemsize) is None
    piece = piece_of(new, dtype.itemsize)
    for change, span in zip(_encoded(None, piece, HostBytes(view_of(new))), piece.spans, strict=True):
        assert b"".join(change.segments) == delta.encode_whole(view_of(new[span.place]))


def test_no_element_is_changed_of_nothing() -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    assert isinstance(changed_elements(nothing, nothing, 2), Elements)


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
