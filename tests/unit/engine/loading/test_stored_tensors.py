"""Tensors that come from no staging area are checked in the memory that they are loaded from."""

from pathlib import Path

import pytest
import torch

from rollout_service.engine.loading import stored_tensors as module
from rollout_service.engine.loading.stored_tensors import stored_tensors
from rollout_service.errors import LogCorrupt
from rollout_service.protocol.tensors import STORED_DTYPE_BYTES, StoredDtype
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, StoredTensor
from tests.unit.store.versions import FIRST, SECOND, commit, written

NUMBER, SIZE = 50, 3001


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Manifest]:
    """A version of many tensors, each filled with its number, read in batches of a few."""
    monkeypatch.setattr(module, "_BATCH_BYTES", 4 * SIZE)
    tensors = {str(i): ("float8_e4m3fn", (SIZE,), bytes([i]) * SIZE) for i in range(NUMBER)}
    return tmp_path, written(tmp_path, tensors, max_file_bytes=20 * SIZE)


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
    kept, addresses = [], set()
    for number, (name, tensor) in enumerate(stored_tensors(*many)):
        assert name == str(number) and tensor.view(torch.uint8).unique().tolist() == [number]
        addresses.add(tensor.data_ptr())
        if number % 7 == 0:
            kept.append((number, tensor))
    assert all(tensor.view(torch.uint8).unique().tolist() == [number] for number, tensor in kept)
    assert len(addresses) < NUMBER


def test_tensors_are_batched_where_each_is_aligned_for_its_dtype():
    sizes: list[tuple[str, StoredDtype, int]] = [
        ("a", "int8", 3),
        ("b", "float32", 8),
        ("c", "bfloat16", 4),
        ("d", "int8", 4),
    ]
    odd, offset = [], 8
    for name, dtype, nbytes in sizes:
        odd.append(StoredTensor(name, dtype, (nbytes // STORED_DTYPE_BYTES[dtype],), "1", offset, nbytes, "aa"))
        offset += nbytes
    batched = [[tensor.name for tensor, _ in piece.chunks] for piece in module.batches(odd, 1000)]
    assert batched == [["a"], ["b", "c", "d"]]
    assert [piece.nbytes for piece in module.batches(odd, 12)] == [3, 12, 4]


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
