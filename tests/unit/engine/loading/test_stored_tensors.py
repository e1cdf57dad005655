"""Tensors that come from no staging area are checked in the memory that they are loaded from."""

from pathlib import Path

import pytest
import torch

from rollout_service.engine.loading import stored_tensors as module
from rollout_service.engine.loading.stored_tensors import stored_tensors
from rollout_service.errors import LogCorrupt
from rollout_service.protocol.tensors import TensorSlot
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, Recipe
from rollout_service.store.writer import VersionWriter
from tests.unit.store.versions import FIRST, SECOND, commit

NUMBER, SIZE = 50, 3001


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Manifest]:
    """A version of many tensors, each filled with its number, read in batches of a few."""
    monkeypatch.setattr(module, "_BATCH_BYTES", 4 * SIZE)
    slots = [TensorSlot(name=str(i), dtype="float8_e4m3fn", shape=(SIZE,)) for i in range(NUMBER)]
    writer = VersionWriter(tmp_path, Layout(slots, 20 * SIZE))
    for number, slot in enumerate(slots):
        writer.write(slot.name, memoryview(bytes([number]) * SIZE))
    return tmp_path, Manifest(version=1, fingerprint="m", recipe=Recipe(weights="none"), tensors=writer.finish())


def test_the_tensors_are_those_of_the_files_in_their_order(tmp_path):
    log = WeightLog(tmp_path)
    commit(log, 2)
    found = list(stored_tensors(log.folder(2), log.manifest(2)))
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found] == [
        (FIRST, torch.float32, (4, 5)),
        (SECOND, torch.bfloat16, (6,)),
    ]
    assert bytes(found[0][1].view(torch.uint8).flatten().tolist()) == b"\2" * 80


def test_memory_is_reused_only_when_no_tensor_in_it_is_held(many):
    kept = []
    for number, (name, tensor) in enumerate(stored_tensors(*many)):
        assert name == str(number) and tensor.view(torch.uint8).unique().tolist() == [number]
        if number % 7 == 0:
            kept.append((number, tensor))
    assert all(tensor.view(torch.uint8).unique().tolist() == [number] for number, tensor in kept)


def test_a_tensor_is_announced_first_and_freed_memory_is_reused(many):
    told: dict[str, int] = {}
    for name, tensor in stored_tensors(*many, lambda name, tensor: told.update({name: tensor.data_ptr()})):
        assert told[name] == tensor.data_ptr()
    assert len(told) == NUMBER > len(set(told.values()))


def test_a_flipped_bit_stops_the_load_before_its_tensor_is_given(many):
    folder, manifest = many
    damaged = manifest.tensors[30]
    path = folder / damaged.file
    data = bytearray(path.read_bytes())
    data[damaged.offset + 5] ^= 1
    path.write_bytes(data)
    given = []
    with pytest.raises(LogCorrupt, match=f"30 in {damaged.file}"):
        given.extend(name for name, _ in stored_tensors(folder, manifest))
    assert len(given) <= 30 and not {"30"} & set(given)
