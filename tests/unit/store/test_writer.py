"""Files laid out beforehand and filled in any order are what the safetensors library reads."""

import errno
import os
import random
import resource
from collections.abc import Iterator

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from rollout_service.protocol.tensors import StoredDtype, TensorSlot
from rollout_service.store.layout import Layout
from rollout_service.store.manifest import CHUNK_BYTES
from rollout_service.store.writer import VersionWriter
from tests.unit.ingest.trainer import open_files

TORCH: dict[StoredDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SLOTS = st.lists(st.tuples(st.sampled_from(sorted(TORCH)), SHAPES), min_size=1, max_size=8).map(
    lambda drawn: [TensorSlot(name=f"tensor.{i}", dtype=dtype, shape=shape) for i, (dtype, shape) in enumerate(drawn)]
)


def random_bytes(slot: TensorSlot) -> bytes:
    return random.Random(slot.name).randbytes(slot.nbytes)


@settings(deadline=None, max_examples=60)
@given(SLOTS, st.integers(1, 2000), st.randoms(use_true_random=False))
def test_the_safetensors_library_reads_the_exact_bytes_back(tmp_path_factory, slots, max_file_bytes, order):
    folder = tmp_path_factory.mktemp("version")
    writer = VersionWriter(folder, Layout(slots, max_file_bytes))
    for slot in order.sample(slots, len(slots)):
        writer.write(slot.name, memoryview(random_bytes(slot)))
    stored = writer.finish()
    assert [tensor.name for tensor in stored] == [slot.name for slot in slots]
    for slot, tensor in zip(slots, stored, strict=True):
        with safe_open(folder / tensor.file, framework="pt") as reader:
            read = reader.get_tensor(slot.name)
        assert read.dtype == TORCH[slot.dtype] and tuple(read.shape) == slot.shape
        assert read.flatten().view(torch.uint8).numpy().tobytes() == random_bytes(slot)
        at_offset = (folder / tensor.file).read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        assert at_offset == random_bytes(slot)
        assert tensor.digest == xxhash.xxh3_128_hexdigest(random_bytes(slot))


@pytest.mark.parametrize(
    ("nbytes", "chunks"), [(CHUNK_BYTES, 1), (CHUNK_BYTES + 4, 2), (2 * CHUNK_BYTES, 2), (3 * CHUNK_BYTES + 12, 4)]
)
def test_a_large_tensor_s_digest_is_that_of_its_chunk_digests(tmp_path, nbytes, chunks):
    data = random.Random(nbytes).randbytes(nbytes)
    writer = VersionWriter(tmp_path, Layout(slots_of(nbytes // 4)))
    writer.write("t0", memoryview(data))
    [tensor] = writer.finish()
    found = list(tensor.chunks())
    assert [(c.start, c.start + c.nbytes) for c in found] == [
        (start, min(start + CHUNK_BYTES, nbytes)) for start in range(0, nbytes, CHUNK_BYTES)
    ]
    assert len(found) == chunks and bool(tensor.chunk_digests) == (chunks > 1)
    assert all(c.digest == xxhash.xxh3_128_digest(data[c.start : c.start + c.nbytes]) for c in found)
    of = data if chunks == 1 else b"".join(c.digest for c in found)
    assert tensor.digest == xxhash.xxh3_128_hexdigest(of)


def slots_of(*sizes: int) -> list[TensorSlot]:
    return [TensorSlot(name=f"t{i}", dtype="float32", shape=(size,)) for i, size in enumerate(sizes)]


def test_no_file_is_larger_than_asked_unless_one_tensor_is(tmp_path):
    writer = VersionWriter(tmp_path, Layout(slots_of(10, 10, 100, 5, 5), 80))
    writer.close()
    held = []
    for file in sorted(tmp_path.iterdir()):
        with safe_open(file, framework="pt") as reader:
            held.append(sorted(reader.keys()))
    assert held == [["t0", "t1"], ["t2"], ["t3", "t4"]]


def test_what_has_no_slot_is_refused_and_what_is_missing_named(tmp_path):
    writer = VersionWriter(tmp_path, Layout(slots_of(2, 3, 4)))
    for nbytes in (0, 7, 9):
        with pytest.raises(ValueError, match=f"t0 has {nbytes} bytes, its slot 8"):
            writer.write("t0", memoryview(b"x" * nbytes))
    with pytest.raises(KeyError, match="other"):
        writer.write("other", memoryview(bytes(8)))
    writer.write("t1", memoryview(bytes(12)))
    assert writer.unwritten == ["t0", "t2"]
    with pytest.raises(ValueError, match=r"2 tensors were never written: \['t0', 't2'\]"):
        writer.finish()
    writer.close()
    assert b"x" not in (tmp_path / "weights-00001.safetensors").read_bytes()[-36:]


@pytest.fixture
def little_room() -> Iterator[int]:
    """No file can grow beyond so many bytes: what a full disk is to the writer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield 1 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_fails_at_once_and_leaves_no_file_open(tmp_path, little_room):
    before = open_files()
    with pytest.raises(OSError, match="File too large"):
        VersionWriter(tmp_path, Layout(slots_of(1, little_room), 4))
    assert open_files() == before


def test_a_disk_error_while_writing_fails_the_version(tmp_path, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "the disk took not all of it")

    # Linux tells such an error to one sync only: the last one, which is not replaced here, would not find it
    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr("rollout_service.store.writer._SYNC_BYTES", 1)
    writer = VersionWriter(tmp_path, Layout(slots_of(2)))
    writer.write("t0", memoryview(bytes(8)))
    with pytest.raises(OSError, match="not all of it"):
        writer.finish()
    writer.close()
