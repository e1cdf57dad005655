"""What a worker needs of a version lies in the staging area, checked where it lies, or the reading says why not."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.engine.loading import staging as staging_module
from rollout_service.engine.loading.placement import Move, Placement, Span
from rollout_service.engine.loading.staging import CannotStage, StagingBuffer, StagingKind, packed_runs
from rollout_service.errors import LogCorrupt
from rollout_service.protocol.tensors import TensorSlot
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import CHUNK_BYTES, Manifest, Recipe
from rollout_service.store.mapped_files import MappedFiles
from rollout_service.store.reading import VersionReader
from rollout_service.store.writer import VersionWriter
from tests.unit.store.versions import FIRST, SECOND, commit, flip_a_byte

LARGE = "large.weight"
ROWS, COLUMNS = 3000, 1000
"""Of a tensor of three chunks; a chunk ends inside a row."""


@pytest.fixture
def log(tmp_path: Path) -> WeightLog:
    log = WeightLog(tmp_path)
    commit(log, 1)
    return log


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, Manifest, torch.Tensor]:
    """A version of one large tensor and a small one: folder, manifest, and the large one, uint8 [ROWS, COLUMNS]."""
    folder = tmp_path / "large"
    folder.mkdir()
    slots = [
        TensorSlot(name=LARGE, dtype="float8_e4m3fn", shape=(ROWS, COLUMNS)),
        TensorSlot(name=FIRST, dtype="float32", shape=(4,)),
    ]
    data = random.Random(0).randbytes(ROWS * COLUMNS)
    writer = VersionWriter(folder, Layout(slots))
    writer.write(LARGE, memoryview(data))
    writer.write(FIRST, memoryview(bytes(16)))
    manifest = Manifest(version=3, fingerprint="model", recipe=Recipe(weights="none"), tensors=writer.finish())
    return folder, manifest, torch.frombuffer(bytearray(data), dtype=torch.uint8).view(ROWS, COLUMNS)


def area(kind: StagingKind = "host", like: torch.nn.Module | None = None) -> StagingBuffer:
    return StagingBuffer(kind, like or torch.nn.Linear(8, 8), torch.device("cpu"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["host", "memory"])
def test_the_tensors_are_those_of_the_files(log, kind):
    staging, manifest = area(kind), log.manifest(1)
    placement = Placement.whole(manifest)
    staging.fill(log.folder(1), manifest, placement, every=True)
    tensors = dict(staging.tensors(manifest, placement))
    assert tensors.keys() == {FIRST, SECOND}
    assert tensors[FIRST].shape == (4, 5) and tensors[FIRST].dtype == torch.float32
    assert bytes(tensors[FIRST].view(torch.uint8).flatten().tolist()) == bytes([1]) * 80
    assert bytes(tensors[SECOND].view(torch.uint8).tolist()) == bytes(range(12))


def test_memory_taken_for_a_version_has_its_size_and_is_released(log):
    staging, manifest = area("memory", torch.nn.Linear(1, 1)), log.manifest(1)
    placement = Placement.whole(manifest)
    staging.fill(log.folder(1), manifest, placement, every=True)
    assert staging.memory.numel() == placement.nbytes == 96
    staging.release()
    assert staging.memory.numel() == 0


@pytest.mark.parametrize("columns", [slice(0, 500), slice(500, 1000), slice(0, 1000)])
def test_a_part_of_each_row_lies_packed(large, columns, monkeypatch):
    monkeypatch.setattr(staging_module, "PIECE_BYTES", CHUNK_BYTES)
    folder, manifest, held = large
    span = Span(LARGE, columns.start, columns.stop - columns.start, ROWS, COLUMNS)
    placement, staging = Placement([span]), area("memory")
    staging.fill(folder, manifest, placement, every=False)
    assert placement.nbytes == held[:, columns].numel()
    assert torch.equal(staging.memory.view(ROWS, -1), held[:, columns])


def test_a_flipped_bit_is_reported_with_tensor_chunk_and_file(large):
    folder, manifest, _ = large
    stored = manifest.tensors[0]
    flip(folder / stored.file, stored.offset + CHUNK_BYTES + 7)
    reads_it = Placement([Span(LARGE, 0, 500, ROWS, COLUMNS)])
    with pytest.raises(LogCorrupt, match=rf"version 3: {LARGE} in .*: chunk 1 of 3 \(bytes 1048576 to 2097152\)") as e:
        area("memory").fill(folder, manifest, reads_it, every=False)
    assert e.value.detail == {"version": 3, "tensor": LARGE, "chunk": 1, "file": stored.file}


def test_the_rest_is_checked_by_whoever_checks_every_chunk(large):
    folder, manifest, held = large
    stored = manifest.tensors[0]
    flip(folder / stored.file, stored.offset + CHUNK_BYTES + 7)
    elsewhere, staging = Placement([Span(LARGE, 0, 1000)]), area("memory")
    staging.fill(folder, manifest, elsewhere, every=False)
    assert torch.equal(staging.memory[:1000], held[0])
    with pytest.raises(LogCorrupt, match="chunk 1 of 3"):
        staging.fill(folder, manifest, elsewhere, every=True)


def test_a_file_that_is_too_short_is_an_error_that_names_it(log):
    manifest = log.manifest(1)
    (file,) = log.folder(1).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(LogCorrupt, match=f"{SECOND} in .*{file.name} ends 5 bytes early"):
        area().fill(log.folder(1), manifest, Placement.whole(manifest), every=True)


def test_a_gpu_without_memory_to_check_in_refuses_the_version(log, monkeypatch):
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    manifest = log.manifest(1)
    staging = area("device")
    monkeypatch.setattr(staging, "_reader", lambda folder, manifest: VersionReader(folder, manifest, MappedFiles()))
    monkeypatch.setattr(staging_module, "stage_on_device", out_of_memory)
    with pytest.raises(CannotStage, match="no memory to check version 1: CUDA out of memory"):
        staging.fill(log.folder(1), manifest, Placement.whole(manifest), every=True)


def test_after_a_failure_the_next_version_is_staged(log):
    commit(log, 2)
    flip_a_byte(log, 1, SECOND)
    staging = area()
    for version, fails in ((1, True), (2, False)):
        manifest = log.manifest(version)
        placement = Placement.whole(manifest)
        try:
            staging.fill(log.folder(version), manifest, placement, every=True)
        except LogCorrupt:
            assert fails
        else:
            assert not fails
    assert bytes(dict(staging.tensors(manifest, placement))[FIRST].view(torch.uint8).flatten().tolist()) == b"\2" * 80


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(20, 60))
def test_moves_to_adjacent_places_are_packed_into_one_copy(draw, packed_bytes):
    read, packed = torch.randint(0, 256, (400,), dtype=torch.uint8), torch.zeros(packed_bytes, dtype=torch.uint8)
    moves, target = [], 0
    for _ in range(draw.randint(1, 8)):
        row_bytes, rows = draw.randint(1, 5), draw.randint(1, 4)
        target += draw.choice([0, 0, 16])
        moves.append(Move(draw.randint(0, 300), target, row_bytes, rows, row_bytes + draw.randint(0, 9)))
        target += rows * row_bytes
    area, wanted, waiting = torch.zeros(target), torch.zeros(target), []

    def copied() -> None:
        """As a device does: some time later."""
        for place, held in waiting:
            area[place : place + held.numel()] = held
        waiting.clear()

    for run in packed_runs(moves, read, packed, copied):
        waiting.append(run)
    gaps = sum(a.target + a.rows * a.row_bytes != b.target for a, b in pairwise(moves))
    if sum(move.rows * move.row_bytes for move in moves) <= packed_bytes:
        assert len(waiting) == 1 + gaps
    copied()
    for move in moves:
        for row in range(move.rows):
            source, place = move.source + row * move.stride_bytes, move.target + row * move.row_bytes
            wanted[place : place + move.row_bytes] = read[source : source + move.row_bytes]
    assert torch.equal(area, wanted)


def test_a_version_too_large_for_the_area_is_refused_with_sizes(log, monkeypatch):
    monkeypatch.setattr(staging_module, "_SLACK_BYTES", 16)
    manifest = log.manifest(1)
    with pytest.raises(CannotStage, match=r"96 bytes of version 1 would lie in the staging area, which has 24"):
        area(like=torch.nn.Linear(1, 1)).fill(log.folder(1), manifest, Placement.whole(manifest), every=True)
