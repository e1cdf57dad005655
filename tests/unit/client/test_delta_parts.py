"""A delta is sent while it is being found: part by part, each about the tensors that both ends know it to be about."""

import threading
from collections.abc import Iterator

import pytest
import torch

from rollout_service.client import RolloutClient, _pieces
from rollout_service.client._compare import Changed
from rollout_service.client._sent_weights import part_of
from rollout_service.client._tensors import describe
from rollout_service.protocol import delta_parts
from rollout_service.protocol.delta_parts import TensorChange, decode_header, tensors_of_parts
from rollout_service.protocol.upload import UploadTensor

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_parts, "PARTS", 4)
    monkeypatch.setattr(delta_parts, "LEAST_TENSOR_BYTES", 100)


class TestCut:
    @pytest.mark.parametrize(
        ("sizes", "parts"),
        [
            ([], []),
            ([7], [[7]]),
            ([0, 0], [[0, 0]]),
            ([40, 60, 1], [[40, 60], [1]]),
            ([900, 10, 20, 30, 900], [[900], [10, 20, 30], [900]]),
            ([10] * 100, [[10] * 25] * 4),
            ([60, 60, 60], [[60], [60], [60]]),
            ([100, 0, 0], [[100, 0, 0]]),
        ],
    )
    def test_parts_are_about_tensors_that_follow_each_other(self, sizes, parts):
        assert [[sizes[number] for number in tensors] for tensors in tensors_of_parts(sizes)] == parts

    def test_no_piece_has_tensors_of_two(self, monkeypatch):
        dtypes = ["float32" if number % 3 else "bfloat16" for number in range(60)]
        table = tuple(UploadTensor(name=str(number), dtype=dtype, shape=(7,)) for number, dtype in enumerate(dtypes))
        parts, pieces = tensors_of_parts([tensor.nbytes for tensor in table]), _pieces.pieces_of(table)
        assert len(pieces) == 2 * 4 and len(parts) == 4
        assert sorted(span.tensor for piece in pieces for span in piece.spans) == list(range(60))
        for piece in pieces:
            assert sum(any(span.tensor in part for span in piece.spans) for part in parts) == 1
        monkeypatch.setattr(delta_parts, "MAX_TENSOR_BYTES", 200)  # of large versions there are more
        assert list(map(len, tensors_of_parts([100] * 100))) == [2] * 50


class TestPart:
    def test_it_tells_of_each_tensor_whether_and_how_it_has_changed(self):
        changes = [None, Changed(b"abc", "01" * 16), None, Changed(b"defg", "02" * 16)]
        part = part_of(2, 5, changes, 1000)
        data = bytes(part.data)
        header = decode_header(memoryview(data), len(data), range(5, 9), [10] * 4)
        assert header.changes == (None, TensorChange(3, "01" * 16), None, TensorChange(4, "02" * 16))
        assert [data[start:] for start in header.starts] == [b"abcdefg", b"abcdefg", b"defg", b"defg"]
        assert (part.index, part.counts, part.nbytes) == (2, 1000, len(data))


def weights_of(*sizes: int) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {f"w{number}": torch.randn(size, generator=generator).bfloat16() for number, size in enumerate(sizes)}


def stepped(weights: Tensors) -> Tensors:
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in new.values():
        tensor.view(torch.int16)[::50] ^= 1
    return new


async def test_they_are_sent_while_others_are_compared(service, monkeypatch):
    monkeypatch.setattr("rollout_service.client._compare.AT_ONCE_BYTES", 1)
    monkeypatch.setattr("rollout_service.client._delta.CONVERTED_BYTES", 1)
    came = threading.Event()

    async def note(_: int) -> None:
        came.set()

    weights = weights_of(500, 300, 400, 700)
    table = [describe(name, tensor) for name, tensor in weights.items()]

    def coming() -> Iterator[tuple[str, torch.Tensor]]:
        *others, last = stepped(weights).items()
        yield from others
        assert came.wait(20)
        yield last

    async with RolloutClient(service.url) as client:
        await client.push_weights(1, weights, transport="delta", wait="none")
        service.before_part = note
        await client.push_weights(2, coming(), tensor_table=table, transport="delta", wait="none")
    upload = service.uploads[2]
    assert upload.state == "committed" and sorted(upload.parts) == list(range(len(upload.begin.delta_parts)))
    for part, tensors in enumerate(upload.begin.delta_parts):
        data = upload.parts[part]
        header = decode_header(memoryview(data), len(data), tensors, [table[number].nbytes for number in tensors])
        assert None not in header.changes
