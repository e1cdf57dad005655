"""What a client remembers of a version, and what it finds to have changed in it."""

import weakref
from collections.abc import Callable

import pytest
import torch

from rollout_service.client import _pieces, _sent_weights
from rollout_service.client._sent_weights import SentWeights
from rollout_service.client._tensors import describe
from rollout_service.model.convert import tensor_bytes
from rollout_service.protocol import delta
from rollout_service.protocol.upload import base_digest
from rollout_service.store.manifest import tensor_digests

Tensors = dict[str, torch.Tensor]


@pytest.fixture(
    params=[(8 << 20, 64 << 20), (264, 64 << 20), (264, 528), (264, 2112)],
    ids=["one segment", "several segments", "several pieces", "joined in pieces"],
)
def tensors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tensors:
    """Of all stored dtypes, one of them empty."""
    segment_bytes, piece_bytes = request.param
    monkeypatch.setattr(delta, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(_pieces, "PIECE_BYTES", piece_bytes)
    generator = torch.Generator().manual_seed(0)
    wide = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {
        "codes": wide["codes"].to(torch.float8_e4m3fn),
        "scales": wide["scales"],
        "more codes": wide["more codes"].to(torch.float8_e4m3fn),
        "norm": wide["norm"].bfloat16(),
        "none": wide["none"].bfloat16(),
    }


SHAPES = {"codes": (33, 40), "scales": (5,), "more codes": (20, 3), "norm": (1200,), "none": (0, 4)}


def stepped(tensors: Tensors) -> Tensors:
    """Others, of which a few elements differ; all of one tensor."""
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    new["codes"].view(torch.uint8)[7, 3] ^= 1
    new["codes"].view(torch.uint8)[32, 39] ^= 1
    new["scales"] *= 1.5
    return new


def sent(tensors: Tensors, version: int = 3) -> SentWeights:
    """After it was taken and committed."""
    weights = SentWeights(tuple(describe(name, tensor) for name, tensor in tensors.items()))
    assert b"".join(bytes(flat.numpy()) for flat in weights.take(tensors.items())) == b"".join(bytes_of(tensors))
    weights.version = version
    return weights


def bytes_of(tensors: Tensors) -> list[bytes]:
    return [bytes(tensor_bytes(tensor)) for tensor in tensors.values()]


def held(weights: SentWeights) -> list[bytes]:
    return [b"".join(bytes(flat.numpy()) for flat in weights._bytes_of(i)) for i in range(len(weights.table))]


def test_memory_is_unpinned_before_it_is_unmapped(tensors, monkeypatch):
    pinned: list[int] = []
    unpinned: list[bool] = []

    def pin(memory: memoryview) -> Callable[[], None]:
        mapping = weakref.ref(memory.obj)
        pinned.append(memory.nbytes)
        return lambda: unpinned.append(mapping() is not None)

    monkeypatch.setattr(_sent_weights, "pin", pin)
    monkeypatch.setattr(_sent_weights, "lies_on_gpu", lambda tensor: True)
    weights = sent(tensors)
    assert sum(pinned) == weights.nbytes and not unpinned
    del weights
    assert unpinned == [True] * len(pinned)


def test_memory_that_cuda_refuses_is_used_unpinned(monkeypatch):
    def refuse(memory: memoryview) -> Callable[[], None]:
        raise OSError("CUDA pins no bytes")

    monkeypatch.setattr(_sent_weights, "pin", refuse)
    monkeypatch.setattr(_sent_weights, "lies_on_gpu", lambda tensor: True)
    tensors = {"norm": torch.ones(5)}
    assert held(sent(tensors)) == bytes_of(tensors)


def test_digests_of_tensors_in_pieces_are_those_of_wholes():
    tensor = torch.randint(0, 256, ((64 << 20) + 5,), dtype=torch.uint8).view(torch.int8)
    weights = sent({"codes": tensor})
    assert len(weights._pieces) == 3
    assert weights.as_base().base_digest == base_digest([tensor_digests(tensor_bytes(tensor))[0]])


def test_changes_make_the_new_tensors_of_the_old_ones(tensors):
    weights, new = sent(tensors), stepped(tensors)
    changes = weights.changes_to(new.items())
    assert changes is not None
    assert [change is not None for change in changes] == [True, True, False, False, False]
    assert held(weights) == bytes_of(tensors) and weights.version == 3
    digests = [tensor_digests(tensor_bytes(tensor))[0] for tensor in tensors.values()]
    announced = weights.as_base()
    assert (announced.base, announced.base_digest) == (3, base_digest(digests))
    for change, tensor in zip(changes, new.values(), strict=True):
        assert change is None or change.digest == tensor_digests(tensor_bytes(tensor))[0]
    weights.change(changes)
    assert held(weights) == bytes_of(new) and weights.version is None


@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_more_changes_than_are_worth_it_are_taken_as_they_are(tensors, monkeypatch, at_once):
    monkeypatch.setattr("rollout_service.client._compare.AT_ONCE_BYTES", at_once)
    weights, other = sent(tensors), {name: (tensor.float() + 1).to(tensor.dtype) for name, tensor in tensors.items()}
    assert weights.changes_to(other.items()) is None
    assert held(weights) == bytes_of(other) and weights.version is None


def test_a_tensor_whose_piece_is_incomplete_is_taken_too(monkeypatch):
    monkeypatch.setattr(_pieces, "PIECE_BYTES", 1200)
    monkeypatch.setattr("rollout_service.client._compare.AT_ONCE_BYTES", 1)
    # two tensors of bytes make one piece, which the large ones between them do not complete
    sizes = {"codes": (64, torch.int8), "a": (300, torch.float32), "b": (300, torch.float32), "more": (64, torch.int8)}
    old = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in sizes.items()}
    new = {name: torch.ones_like(tensor) for name, tensor in old.items()}
    weights = sent(old)
    assert weights.changes_to(new.items()) is None
    assert held(weights) == bytes_of(new)
    weights.version = 4
    digests = [tensor_digests(tensor_bytes(tensor))[0] for tensor in new.values()]
    assert weights.as_base().base_digest == base_digest(digests)
