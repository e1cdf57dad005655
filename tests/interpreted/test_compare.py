"""What a client finds to have changed on a GPU, with the digests that it makes there, is what threads find."""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from rollout_service.client import _compare, _gpu_compare, _pieces
from rollout_service.client._gpu_compare import Counting, Found
from rollout_service.client._pieces import batches_of
from rollout_service.client._sent_weights import Changes, SentWeights, prepare
from rollout_service.errors import QuantizationError
from rollout_service.gpu import grouped_difference
from rollout_service.protocol import delta
from rollout_service.quant import digests
from rollout_service.store import manifest
from rollout_service.store.manifest import tensor_digests
from tests.unit.client.test_sent_weights import Tensors, bytes_of, held, sent

SIZES = {"codes": 3000, "few scales": 5, "norm": 700, "more codes": 1500, "scales": 90, "head": 1100, "rest": 40,
         "none": 0}  # fmt: skip
DTYPES = {"codes": torch.float8_e4m3fn, "more codes": torch.int8, "scales": torch.float32, "few scales": torch.float32}


@pytest.fixture(
    params=[(1 << 20, 1 << 20, 1 << 20), (512, 2048, 1 << 20), (512, 2048, 4096), (512, 1024, 1)],
    ids=["one batch", "pieces in one batch", "batches", "a piece each"],
)
def tensors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tensors:
    """Of elements of all sizes."""
    segment_bytes, piece_bytes, batch_bytes = request.param
    monkeypatch.setattr(delta, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(_pieces, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(_pieces, "BATCH_BYTES", batch_bytes)
    for module in (manifest, _gpu_compare):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    generator = torch.Generator().manual_seed(0)
    wide = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
    return {name: tensor.to(DTYPES.get(name, torch.bfloat16)) for name, tensor in wide.items()}


def stepped(tensors: Tensors) -> Tensors:
    """A hundredth of most tensors changed, and much of "head" and "few scales"."""
    generator = torch.Generator().manual_seed(1)
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in new.items():
        share = {"few scales": 1, "head": 0.9, "rest": 0}.get(name, 0.01)
        hit = torch.rand(tensor.shape, generator=generator) < share
        flat = tensor.view(torch.uint8).view(-1, tensor.element_size())
        flat[:, 0] += hit.to(torch.uint8) * torch.randint(1, 256, hit.shape, generator=generator).to(torch.uint8)
    codes = new["codes"].view(torch.uint8)
    codes[512:812] += 1  # most of a segment, and little of a piece
    codes[1024:1536] = tensors["codes"].view(torch.uint8)[1024:1536]  # nothing of a segment
    return new


def changes_of(
    tensors: Tensors, new: Tensors, monkeypatch: pytest.MonkeyPatch, is_on_gpu: Callable[[str], bool]
) -> Changes:
    """As if tensors were on a GPU; makes sure that the changes are those of ``new``."""
    monkeypatch.setattr("rollout_service.client._sent_weights.LARGEST_SHARE", 1)
    there = {tensor.data_ptr() for name, tensor in new.items() if is_on_gpu(name)}
    monkeypatch.setattr(_compare, "lies_on_gpu", lambda tensor: tensor.untyped_storage().data_ptr() in there)
    weights = sent(tensors)
    changes = weights.changes_to(new.items())
    assert changes is not None and held(weights) == bytes_of(tensors)
    for change, tensor in zip(changes, new.values(), strict=True):
        assert change is None or change.digest == tensor_digests(memoryview(tensor.view(torch.uint8).numpy()))[0]
    weights.change(changes)
    assert held(weights) == bytes_of(new)
    return changes


class Watched:
    """What is done on the GPU, and fails there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches, self.reads = 0, 0
        self.fails_at: tuple[Sequence[int], Sequence[int]] = (), ()
        """Batches that are not counted, and runs that are not read, by their numbers."""
        monkeypatch.setattr(_compare, "queue_count", self._counting)
        monkeypatch.setattr(_compare, "queue_search", self._found)

    def _counting(self, *args: object) -> Counting:
        self.batches += 1
        if self.batches - 1 in self.fails_at[0]:
            raise torch.cuda.OutOfMemoryError("no room to count")
        return _gpu_compare.queue_count(*args)

    def _found(self, *args: object) -> Found:
        self.reads += 1
        if self.reads - 1 in self.fails_at[1]:
            raise torch.cuda.OutOfMemoryError("no room to read")
        return _gpu_compare.queue_search(*args)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.mark.parametrize("at_once", [1, _compare.AT_ONCE_BYTES])
def test_it_is_what_threads_find(tensors, monkeypatch, watched, at_once):
    monkeypatch.setattr(_compare, "AT_ONCE_BYTES", at_once)
    new = stepped(tensors)
    expected = changes_of(tensors, new, monkeypatch, lambda name: False)
    assert not watched.batches
    assert changes_of(tensors, new, monkeypatch, lambda name: True) == expected
    assert watched.batches and watched.reads
    same = {name: tensor.clone() for name, tensor in tensors.items()}
    assert not any(changes_of(tensors, same, monkeypatch, lambda name: True))


@pytest.mark.parametrize(
    "fails_at",
    [((0,), ()), ((), (1, 2)), ((0,), (0,)), (range(99), ()), ((), range(99))],
    ids=["first", "middle read", "both", "all", "all reads"],
)
def test_without_room_on_the_gpu_nothing_is_lost(tensors, monkeypatch, watched, fails_at, caplog):
    new = stepped(tensors)
    expected = changes_of(tensors, new, monkeypatch, lambda name: False)
    watched.fails_at = fails_at
    assert changes_of(tensors, new, monkeypatch, lambda name: True) == expected
    has_failed = any(each < watched.batches for each in fails_at[0]) or any(e < watched.reads for e in fails_at[1])
    assert has_failed == any("the GPU has no room" in record.message for record in caplog.records)


@pytest.mark.parametrize("there", [{"codes", "head"}, {"scales"}])
def test_some_tensors_lie_on_the_host(tensors, monkeypatch, there):
    new = stepped(tensors)
    expected = changes_of(tensors, new, monkeypatch, lambda name: False)
    assert changes_of(tensors, new, monkeypatch, there.__contains__) == expected


@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_more_changes_than_are_worth_it_are_taken_as_they_are(tensors, monkeypatch, at_once):
    monkeypatch.setattr(_compare, "AT_ONCE_BYTES", at_once)
    monkeypatch.setattr(_compare, "lies_on_gpu", lambda tensor: True)
    weights, other = sent(tensors), {name: (tensor.float() + 1).to(tensor.dtype) for name, tensor in tensors.items()}
    assert weights.changes_to(other.items()) is None
    assert held(weights) == bytes_of(other) and weights.version is None


def test_it_gives_up_between_two_pieces_of_a_tensor(monkeypatch):
    monkeypatch.setattr(delta, "SEGMENT_BYTES", 512)
    monkeypatch.setattr(_pieces, "PIECE_BYTES", 512)
    monkeypatch.setattr(_pieces, "BATCH_BYTES", 1024)
    monkeypatch.setattr(_compare, "AT_ONCE_BYTES", 1)
    monkeypatch.setattr("rollout_service.client._sent_weights.LARGEST_SHARE", 0.05)
    monkeypatch.setattr(_compare, "lies_on_gpu", lambda tensor: True)
    tensors = {name: torch.zeros(2500, dtype=torch.int8) for name in ("first", "second")}
    weights, other = sent(tensors), {name: tensor + 1 for name, tensor in tensors.items()}
    # the last piece of the first is in a batch with pieces of the second
    assert [len(batch.pieces) for batch in batches_of(weights._pieces)] == [2] * 5

    def coming() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", other["first"]
        assert held(weights)[0] == bytes_of(other)[0], "it has given up"
        yield "second", other["second"]

    assert weights.changes_to(coming()) is None
    assert held(weights) == bytes_of(other)


def test_tensors_that_cannot_be_compared_leave_it_what_it_was(tensors, monkeypatch):
    monkeypatch.setattr(_compare, "lies_on_gpu", lambda tensor: True)
    weights: SentWeights = sent(tensors)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(stepped(tensors).items())[:4]
        raise QuantizationError("scales[3] is nan")

    with pytest.raises(QuantizationError):
        weights.changes_to(broken())
    assert held(weights) == bytes_of(tensors) and weights.version == 3


def test_prepare_launches_every_form_of_each_kernel(monkeypatch):
    monkeypatch.setattr(_compare, "lies_on_gpu", lambda tensor: True)
    monkeypatch.setattr(digests, "_tried", set())
    launched = {
        name: launches_of(module, name, monkeypatch)
        for module, name in [(grouped_difference, "subtract_tiles"), (grouped_difference, "encode_changes"),
                             (digests, "add_up")]
    }  # fmt: skip
    prepare(None)
    sizes = {1, 2, 4}
    alignments = {(size, aligned) for size in sizes for aligned in (0, 16 // size)}
    assert {((1 << 14) // each["TILE"], each["ALIGNED"]) for each in launched["subtract_tiles"]} == alignments
    assert {each["ITEMSIZE"] for each in launched["encode_changes"]} == sizes
    assert {each["ALIGNED"] for each in launched["add_up"]} == {True, False}


def launches_of(module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the keyword arguments of each launch of a kernel."""
    kernel, launches = getattr(module, name), []

    class Recording:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: object, **kwargs: object) -> None:
                launches.append(kwargs)
                kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(module, name, Recording())
    return launches
