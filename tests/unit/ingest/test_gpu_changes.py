"""Changes that a GPU applies, here by the same operations on the CPU, make what threads make of them."""

import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_service.errors import InvalidDelta, QuantizationError
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.sources import gpu_changes
from rollout_service.ingest.sources.delta import DeltaOfVersion
from rollout_service.ingest.sources.gpu_changes import made_on
from rollout_service.model.convert import Converter, Named
from rollout_service.protocol import delta
from rollout_service.protocol.upload import BeginUpload, TrainerRecipe
from rollout_service.quant.verdicts import Verdicts
from rollout_service.store.log import WeightLog
from rollout_service.store.mapped_files import MappedFiles
from tests.unit.ingest.test_ingest_delta import NORM, UP_PROJ, Stored, delta_of, digest_of
from tests.unit.ingest.trainer import Trainer, Weights, config_of
from tests.unit.protocol.test_delta import ITEMSIZES, bytes_of, deflated, random_bits, segment, stepped

CPU = torch.device("cpu")


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("share", [1e-4, 0.01, 0.2])
def test_segments_with_changes_without_and_whole_ones(
    itemsize: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "SEGMENT_BYTES", 4096)
    monkeypatch.setattr(gpu_changes, "MOST_CHANGES", 1)
    old = random_bits(20_003, itemsize)
    new = stepped(old, share)
    in_segment = 4096 // itemsize
    new[:in_segment] = old[:in_segment]
    new[in_segment : 2 * in_segment] = random_bits(in_segment, itemsize, seed=9)
    encoded = delta.encode(bytes_of(old), bytes_of(new), itemsize)
    segments = delta.changed_segments(memoryview(encoded), new.nbytes, itemsize)
    assert {each.encoded[0] for each in segments} == {1, 2} and segments[0].number == 1
    made = made_on(CPU, bytes_of(old), segments, itemsize)
    assert made is not None and bool(made.are_inside)
    np.testing.assert_array_equal(made.data.numpy(), new.view(np.uint8))


def test_many_changes_are_left_to_the_host() -> None:
    old = random_bits(10_000, 1)
    for share, is_left in ((0.05, False), (0.08, True)):
        encoded = delta.encode(bytes_of(old), bytes_of(stepped(old, share)), 1)
        segments = delta.changed_segments(memoryview(encoded), old.nbytes, 1)
        assert (made_on(CPU, bytes_of(old), segments, 1) is None) == is_left


@pytest.mark.parametrize("number", [0, 1])
def test_a_change_outside_its_segment_is_told(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "SEGMENT_BYTES", 100)
    beyond = segment(1, deflated(b"\x64"), b"", b"", deflated(b"\x01"))  # element 100 of 100
    encoded = [delta.NOTHING, delta.NOTHING]
    encoded[number] = beyond
    segments = delta.changed_segments(memoryview(b"".join(encoded)), 200, 1)
    made = made_on(CPU, memoryview(bytearray(200)), segments, 1)
    assert made is not None and not bool(made.are_inside)


class OnGpu:
    """Makes version 2 of what version 1 in a log in memory stores."""

    def __init__(self, log: WeightLog, recipe: TrainerRecipe, old: Stored) -> None:
        self._log, self._converter, self.old = log, Converter(recipe, device="cpu"), old
        self.in_rooms: set[str] = set()

    def made(self, new: Stored, begin: BeginUpload | None = None, stream: bytes | None = None) -> Stored:
        """``begin``, ``stream``: instead of those of ``new``. ``in_rooms`` then says what was not left there."""
        announced, encoded = delta_of(2, 1, self.old, new)
        begin, stream = begin or announced, stream or encoded
        came: dict[str, torch.Tensor] = {}
        start = 0
        for tensor in begin.stream:
            came[tensor.name] = torch.frombuffer(bytearray(stream[start : start + tensor.nbytes]), dtype=torch.uint8)
            start += tensor.nbytes

        def changes(names: Sequence[str]) -> Iterator[Named]:
            return ((name, came[name]) for name in names)

        mapped = MappedFiles()
        source = DeltaOfVersion(self._log, begin, self._log.manifest(1).recipe, self._converter, mapped)
        rooms = {name: memoryview(bytearray(tensor.nbytes)) for name, tensor in new.items()}
        verdicts = Verdicts()
        try:
            read = source.reading(changes, rooms.__getitem__, CPU)
            made = {name: t.clone() for name, t in source.convert(read(list(new)), verdicts=verdicts)}
            verdicts.collect()
            verdicts.require()
        finally:
            source.close()
            mapped.close()
        self.in_rooms = {name for name in came if any(rooms[name])}
        return made


@pytest.fixture
async def on_gpu(model: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OnGpu]:
    monkeypatch.setattr("rollout_service.model.convert.lies_on_gpu", lambda tensor: True)
    monkeypatch.setattr(gpu_changes, "MOST_CHANGES", 1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ingest = Ingest(config_of(model, Path(folder)))
        await ingest.start()
        await Trainer(ingest).push(1, weights)
        recipe = await ingest.recipe()
        await ingest.stop()
        yield OnGpu(WeightLog(Path(folder)), recipe, dict(Converter(recipe, device="cpu").convert(weights.items())))


@pytest.mark.parametrize("most_bytes", [64 << 20, 0], ids=["at once", "in stretches"])
def test_it_makes_the_tensors_that_were_sent(on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    monkeypatch.setattr("rollout_service.ingest.sources.delta.MOST_BYTES", most_bytes)
    monkeypatch.setattr(delta, "SEGMENT_BYTES", 1024)
    monkeypatch.setattr("rollout_service.ingest.sources.delta._applier", lambda: None)  # not by the host
    new = {name: tensor.clone() for name, tensor in on_gpu.old.items()}
    new[UP_PROJ].view(torch.uint8)[3, ::50] ^= 1
    new[NORM].view(torch.int16)[[0, 7, 255]] ^= 1
    made = on_gpu.made(new)
    assert on_gpu.in_rooms == (set() if most_bytes else {UP_PROJ, NORM})
    assert {name: digest_of(tensor) for name, tensor in made.items()} == {n: digest_of(t) for n, t in new.items()}
    assert {name: (t.dtype, t.shape) for name, t in made.items()} == {n: (t.dtype, t.shape) for n, t in new.items()}


@pytest.mark.parametrize("most_bytes", [64 << 20, 0], ids=["at once", "in stretches"])
def test_what_is_no_number_is_refused_by_its_place(
    on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr("rollout_service.ingest.sources.delta.MOST_BYTES", most_bytes)
    new = {**on_gpu.old, NORM: on_gpu.old[NORM].clone()}
    new[NORM][3] = torch.nan
    with pytest.raises(QuantizationError, match=rf"{NORM}\[3\] is nan"):
        on_gpu.made(new)


def test_damage_that_makes_a_nan_is_told_from_weights_that_are_none(on_gpu: OnGpu) -> None:
    new = {**on_gpu.old, NORM: on_gpu.old[NORM].clone()}
    new[NORM][3] = torch.nan
    announced, _ = delta_of(2, 1, on_gpu.old, new)
    assert announced.delta is not None
    lies = tuple(each and each.model_copy(update={"digest": "ab" * 16}) for each in announced.delta.changes)
    lie = announced.model_copy(update={"delta": announced.delta.model_copy(update={"changes": lies})})
    with pytest.raises(InvalidDelta, match=f"the changes of {NORM} since version 1 make a tensor that hashes to"):
        on_gpu.made(new, lie)


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (delta.encode_changes(np.array([5000]), np.array([1], np.uint16), 1 << 20), "a change lies outside of its seg"),
        (b"\x07" + bytes(40), "segment 0: it begins with 7"),
    ],
)
@pytest.mark.parametrize("most_bytes", [64 << 20, 0], ids=["at once", "in stretches"])
def test_changes_that_do_not_decode_are_refused_by_name(
    on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch, stream: bytes, complaint: str, most_bytes: int
) -> None:
    monkeypatch.setattr("rollout_service.ingest.sources.delta.MOST_BYTES", most_bytes)
    new = {**on_gpu.old, NORM: on_gpu.old[NORM].clone()}
    new[NORM].view(torch.int16)[3] ^= 1
    announced, _ = delta_of(2, 1, on_gpu.old, new)
    assert announced.delta is not None
    longer = tuple(each and each.model_copy(update={"nbytes": len(stream)}) for each in announced.delta.changes)
    lie = announced.model_copy(update={"delta": announced.delta.model_copy(update={"changes": longer})})
    with pytest.raises(InvalidDelta, match=f"the changes of {NORM} since version 1 cannot be decoded: {complaint}"):
        on_gpu.made(new, lie, stream)


def test_where_the_gpu_has_no_room_the_host_makes_it(on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("rollout_service.ingest.sources.delta.made_on", full)
    new = {**on_gpu.old, NORM: on_gpu.old[NORM].clone()}
    new[NORM].view(torch.int16)[3] ^= 1
    assert digest_of(on_gpu.made(new)[NORM]) == digest_of(new[NORM])
    assert on_gpu.in_rooms == {NORM}
