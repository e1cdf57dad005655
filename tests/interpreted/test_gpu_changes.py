"""Changes that a GPU applies, its kernel run by Triton's interpreter, make what threads make of them."""

import asyncio
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_service.errors import InvalidDelta, QuantizationError
from rollout_service.ingest.sources import gpu_changes
from rollout_service.ingest.sources.delta import Change, DeltaOfVersion
from rollout_service.ingest.sources.gpu_changes import Changed, made_on
from rollout_service.model.convert import Converter
from rollout_service.protocol import delta
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.store.log import WeightLog
from rollout_service.store.mapped_files import MappedFiles
from tests.interpreted.test_compare import launches_of
from tests.support.models import make_smallest_qwen3
from tests.support.tensor_changes import ITEMSIZES, bytes_of, encode, frame, random_bits, segment, stepped
from tests.unit.ingest.test_ingest_delta import NORM, UP_PROJ, Stored, delta_of, digest_of
from tests.unit.ingest.trainer import Trainer, config_of, folder_weights, started

CPU = torch.device("cpu")


def changed(old: np.ndarray, new: np.ndarray) -> Changed:
    itemsize = old.itemsize
    return Changed(bytes_of(old), memoryview(encode(bytes_of(old), bytes_of(new), itemsize)), itemsize)


def test_prepare_launches_the_kernel_for_each_size(monkeypatch):
    launches = launches_of(gpu_changes, "apply_changes", monkeypatch)
    gpu_changes.prepare(CPU)
    assert [launch["ITEMSIZE"] for launch in launches] == [1, 2, 4]


@pytest.mark.parametrize("share", [1e-4, 0.01, 0.2])
def test_tensors_with_elements_of_each_size_are_made_at_once(share, monkeypatch):
    monkeypatch.setattr(delta, "SEGMENT_BYTES", 8192)
    olds = [random_bits(length, itemsize, seed=length) for itemsize in ITEMSIZES for length in (20_003, 400, 9000)]
    news = []
    for old in olds:
        new = stepped(old, share)
        in_segment = 8192 // old.itemsize
        new[:in_segment] = old[:in_segment]
        new[in_segment : 2 * in_segment] = random_bits(new[in_segment : 2 * in_segment].size, old.itemsize, seed=9)
        new[-1] += 1
        news.append(new)
    tensors = [changed(old, new) for old, new in zip(olds, news, strict=True)]
    assert any(each.whole for each in tensors) and any(each.segments for each in tensors)
    made = made_on(CPU, tensors)
    assert made.first_outside() is None
    for number, (old, new, data) in enumerate(zip(olds, news, made.tensors, strict=True)):
        np.testing.assert_array_equal(data.numpy(), new.view(np.uint8))
        told = np.flatnonzero(old != new)
        told = told[told // (8192 // old.itemsize) != 1]  # that segment comes whole
        np.testing.assert_array_equal(made.became(number, number + 1).numpy(), new[told].view(f"i{old.itemsize}"))
    of_bytes = [made.became(number, number + 1) for number in range(3)]
    assert torch.equal(made.became(0, 3), torch.cat(of_bytes))


def test_more_changes_than_a_program_takes_together():
    old = random_bits(30_000, 2)
    new = stepped(old, 0.2)
    made = made_on(CPU, [changed(old, new)])
    assert made.became(0, 1).numel() > 4 * 1024
    np.testing.assert_array_equal(made.tensors[0].numpy(), new.view(np.uint8))


@pytest.mark.parametrize("number", [0, 1])
def test_a_change_outside_its_segment_is_told_and_left_out(number, monkeypatch):
    monkeypatch.setattr(delta, "SEGMENT_BYTES", 100)
    beyond = segment(1, frame(b"\x64"), b"", b"", frame(b"\x01"))  # element 100 of 100
    encoded = [delta.NOTHING, delta.NOTHING]
    encoded[number] = beyond
    sound = changed(random_bits(50, 1), stepped(random_bits(50, 1), 0.5))
    made = made_on(CPU, [sound, Changed(memoryview(bytearray(200)), memoryview(b"".join(encoded)), 1)])
    assert made.first_outside() == 1
    assert not made.tensors[1].any()


class OnGpu:
    """Makes version 2 of what version 1 in a log in memory stores."""

    def __init__(self, log: WeightLog, recipe: TrainerRecipe, old: Stored) -> None:
        self._log, self._converter, self.old = log, Converter(recipe, device="cpu"), old
        self.in_rooms: set[str] = set()

    def made(self, new: Stored, **lies: object) -> Stored:
        """``lies``: fields of the changes that are told otherwise. ``in_rooms`` then says what was not left there."""
        begin, told = delta_of(2, 1, self.old, new)
        came = {name: change._replace(**lies) for name, change in told.items()}

        def changes(names: Sequence[str]) -> Iterator[Change | None]:
            return map(came.get, names)

        mapped = MappedFiles()
        source = DeltaOfVersion(self._log, begin, self._log.manifest(1).recipe, self._converter, mapped)
        rooms = {name: memoryview(bytearray(tensor.nbytes)) for name, tensor in new.items()}
        checks = DeferredChecks()
        try:
            read = source.reading(changes, rooms.__getitem__, CPU)
            made = {name: t.clone() for name, t in source.convert(read(list(new)), checks=checks)}
            checks.require()
        finally:
            source.close()
            mapped.close()
        self.in_rooms = {name for name in came if any(rooms[name])}
        return made


@pytest.fixture(scope="module")
def version_1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnGpu]:
    model = make_smallest_qwen3(tmp_path_factory.mktemp("model"))
    weights = folder_weights(model)

    async def pushed(root: Path) -> TrainerRecipe:
        async with started(config_of(model, root)) as ingest:
            await Trainer(ingest).push(1, weights)
            recipe = await ingest.recipe()
        return recipe

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        recipe = asyncio.run(pushed(Path(folder)))
        yield OnGpu(WeightLog(Path(folder)), recipe, dict(Converter(recipe, device="cpu").convert(weights.items())))


@pytest.fixture
def on_gpu(version_1: OnGpu, monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    monkeypatch.setattr("rollout_service.model.convert.lies_on_gpu", lambda tensor: True)
    return version_1


def test_it_makes_the_tensors_that_were_sent(on_gpu, monkeypatch):
    monkeypatch.setattr(delta, "SEGMENT_BYTES", 1024)
    monkeypatch.setattr(delta, "apply_segment", None)  # not by the host
    new = {name: tensor.clone() for name, tensor in on_gpu.old.items()}
    new[UP_PROJ].view(torch.uint8)[3, ::50] ^= 1
    new[NORM].view(torch.int16)[[0, 7, 127]] ^= 1
    made = on_gpu.made(new)
    assert not on_gpu.in_rooms
    assert {name: digest_of(tensor) for name, tensor in made.items()} == {n: digest_of(t) for n, t in new.items()}
    assert {name: (t.dtype, t.shape) for name, t in made.items()} == {n: (t.dtype, t.shape) for n, t in new.items()}


@pytest.mark.parametrize(
    ("segment_bytes", "name", "place", "becomes", "complaint"),
    [
        (8 << 20, NORM, (3,), float("nan"), "is nan"),
        (4, NORM, (3,), float("nan"), "is nan"),  # a whole segment
        (8 << 20, UP_PROJ, (3, 5), float("nan"), "is nan, a code for NaN"),
        (8 << 20, UP_PROJ + "_scale_inv", (0, 0), -1.0, "is -1, a block scale that is not a positive number"),
    ],
)
def test_what_may_not_be_is_refused_by_its_place(on_gpu, monkeypatch, segment_bytes, name, place, becomes, complaint):
    monkeypatch.setattr(delta, "SEGMENT_BYTES", segment_bytes)
    new = {key: tensor.clone() for key, tensor in on_gpu.old.items()}
    new[UP_PROJ].view(torch.uint8)[7, 7] ^= 1  # sound
    new[name][place] = becomes
    with pytest.raises(QuantizationError, match=re.escape(f"{name}{list(place)} {complaint}")):
        on_gpu.made(new)


def test_damage_that_makes_a_nan_is_told_from_weights_that_are_none(on_gpu):
    new = {**on_gpu.old, NORM: on_gpu.old[NORM].clone()}
    new[NORM][3] = torch.nan
    with pytest.raises(InvalidDelta, match=f"the changes of {NORM} since version 1 make a tensor that hashes to"):
        on_gpu.made(new, digest="ab" * 16)


@pytest.mark.parametrize(
    ("encoded", "complaint"),
    [
        (delta.encode_changes(np.array([5000]), np.array([1], np.uint16), 1 << 20), "a change lies outside of its seg"),
        (b"\x07" + bytes(40), "segment 0: it begins with 7"),
    ],
)
def test_changes_that_do_not_decode_are_refused_by_name(on_gpu, encoded, complaint):
    new = {**on_gpu.old, NORM: on_gpu.old[NORM].clone()}
    new[NORM].view(torch.int16)[3] ^= 1
    with pytest.raises(InvalidDelta, match=f"the changes of {NORM} since version 1 cannot be decoded: {complaint}"):
        on_gpu.made(new, encoded=memoryview(encoded))


def test_where_the_gpu_has_no_room_the_host_makes_it(on_gpu, monkeypatch):
    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("rollout_service.ingest.sources.gpu_changes.made_on", full)
    new = {**on_gpu.old, NORM: on_gpu.old[NORM].clone()}
    new[NORM].view(torch.int16)[3] ^= 1
    assert digest_of(on_gpu.made(new)[NORM]) == digest_of(new[NORM])
    assert on_gpu.in_rooms == {NORM}
