"""What a worker needs of a version lies in its staging buffer, checked where it lies, or the answer says why not."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.engine.loading import staging as module
from rollout_service.engine.loading.placement import Move, Placement, Span
from rollout_service.engine.loading.staging import CannotStage, Stager, StagingBuffer, choose_staging, packed_runs
from rollout_service.engine.loading.staging_calls import StageAnswer
from rollout_service.errors import LogCorrupt
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import CHUNK_BYTES, Manifest
from rollout_service.store.mapped_files import MappedFiles
from rollout_service.store.reading import VersionReader
from tests.unit.store.versions import FIRST, SECOND, commit, flip_a_byte, written

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
    data = random.Random(0).randbytes(ROWS * COLUMNS)
    tensors = {LARGE: ("float8_e4m3fn", (ROWS, COLUMNS), data), FIRST: ("float32", (4,), bytes(16))}
    manifest = written(tmp_path / "large", tensors, version=3)
    return tmp_path / "large", manifest, torch.frombuffer(bytearray(data), dtype=torch.uint8).view(ROWS, COLUMNS)


def area(kind: module.StagingKind = "memory", size: int = 8) -> StagingBuffer:
    return StagingBuffer(kind, torch.nn.Linear(size, size), torch.device("cpu"))


def staged(stager: Stager, log: WeightLog, digest: str | None = None) -> StageAnswer:
    return stager.stage(log.folder(1), digest, None)


def corrupt_of(answer: StageAnswer) -> tuple[str, dict[str, Any]]:
    assert answer.corrupt is not None
    return answer.corrupt


class TestBuffer:
    @pytest.mark.parametrize("kind", ["host", "memory"])
    def test_the_tensors_are_those_of_the_files(self, log, kind):
        staging, manifest = area(kind), log.manifest(1)
        placement = Placement.whole(manifest)
        staging.fill(log.folder(1), manifest, placement, every=True)
        tensors = dict(staging.tensors(manifest, placement))
        assert tensors.keys() == {FIRST, SECOND}
        assert tensors[FIRST].shape == (4, 5) and tensors[FIRST].dtype == torch.float32
        assert bytes(tensors[FIRST].view(torch.uint8).flatten().tolist()) == bytes([1]) * 80
        assert bytes(tensors[SECOND].view(torch.uint8).tolist()) == bytes(range(12))
        held = staging.memory.numel()
        staging.release()
        if kind == "memory":  # taken for each version
            assert (held, staging.memory.numel()) == (placement.nbytes, 0) == (96, 0)

    @pytest.mark.parametrize("columns", [slice(0, 500), slice(500, 1000), slice(0, 1000)])
    def test_a_part_of_each_row_lies_packed(self, large, columns, monkeypatch):
        monkeypatch.setattr(module, "PIECE_BYTES", CHUNK_BYTES)
        folder, manifest, held = large
        span = Span(LARGE, columns.start, columns.stop - columns.start, ROWS, COLUMNS)
        placement, staging = Placement([span]), area()
        staging.fill(folder, manifest, placement, every=False)
        assert placement.nbytes == held[:, columns].numel()
        assert torch.equal(staging.memory.view(ROWS, -1), held[:, columns])

    @pytest.mark.parametrize(("reads_it", "every"), [(True, False), (False, True)])
    def test_a_flipped_bit_is_reported_with_tensor_chunk_and_file(self, large, reads_it, every):
        folder, manifest, held = large
        stored = manifest.tensors[0]
        path, place = folder / stored.file, stored.offset + CHUNK_BYTES + 7
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        elsewhere = Placement([Span(LARGE, 0, 1000)])
        staging = area()
        staging.fill(folder, manifest, elsewhere, every=False)
        assert torch.equal(staging.memory[:1000], held[0])
        wanted = Placement([Span(LARGE, 0, 500, ROWS, COLUMNS)]) if reads_it else elsewhere
        with pytest.raises(
            LogCorrupt, match=rf"version 3: {LARGE} in .*: chunk 1 of 3 \(bytes 1048576 to 2097152\)"
        ) as e:
            staging.fill(folder, manifest, wanted, every=every)
        assert e.value.detail == {"version": 3, "tensor": LARGE, "chunk": 1, "file": stored.file}

    def test_a_gpu_without_memory_to_check_in_refuses_the_version(self, log, monkeypatch):
        def out_of_memory(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        manifest = log.manifest(1)
        staging = area("device")
        monkeypatch.setattr(staging, "_reader", lambda folder, manifest: VersionReader(folder, manifest, MappedFiles()))
        monkeypatch.setattr(module, "copy_and_hash", out_of_memory)
        with pytest.raises(CannotStage, match="no memory to check version 1: CUDA out of memory"):
            staging.fill(log.folder(1), manifest, Placement.whole(manifest), every=True)

    def test_a_version_too_large_for_the_area_is_refused_with_sizes(self, log, monkeypatch):
        monkeypatch.setattr(module, "_SLACK_BYTES", 16)
        manifest = log.manifest(1)
        with pytest.raises(CannotStage, match=r"96 bytes of version 1 would lie in the staging area, which has 24"):
            area("host", 1).fill(log.folder(1), manifest, Placement.whole(manifest), every=True)

    @settings(deadline=None)
    @given(st.randoms(use_true_random=False), st.integers(20, 60))
    def test_moves_to_adjacent_places_are_packed_into_one_copy(self, draw, packed_bytes):
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


class TestStager:
    def test_a_sound_version_is_done_and_lies_in_the_area(self, log):
        stager = Stager(area(), rank=1)
        assert staged(stager, log, log.manifest(1).digest) == StageAnswer()
        found = stager.staged(log.folder(1))
        assert found is not None and found.is_whole and found.manifest == log.manifest(1)
        assert stager.staged(log.folder(2)) is None
        stager.forget()
        assert stager.staged(log.folder(1)) is None

    def test_without_an_area_rank_0_checks_and_the_reason_is_given(self, log):
        for rank in (0, 1):
            stager = Stager(None, rank, refused="there is no memory")
            assert staged(stager, log).refused == "there is no memory"
            found = stager.staged(log.folder(1))
            assert found is not None and found.placement is None
        flip_a_byte(log, 1, FIRST)
        assert staged(Stager(None, 1), log).corrupt is None
        message, detail = corrupt_of(staged(Stager(None, 0), log))
        assert FIRST in message and detail["tensor"] == FIRST

    def test_a_damaged_version_is_corrupt_not_a_worker_failure(self, log):
        path = log.folder(1) / "weights-00001.safetensors"
        manifest = log.manifest(1)
        stager = Stager(area("host"), rank=0)
        message, _ = corrupt_of(staged(stager, log, digest="0" * 32))
        assert message.endswith(f"with digest {manifest.digest}, not {'0' * 32}")
        path.write_bytes(path.read_bytes()[:-5])
        assert f"{path.name} ends 5 bytes early" in corrupt_of(staged(stager, log))[0]
        path.unlink()
        assert "cannot be read" in corrupt_of(staged(stager, log))[0]
        assert stager.staged(log.folder(1)) is None
        (log.folder(1) / "manifest.json").write_text("{")
        assert "cannot be read" in corrupt_of(staged(stager, log))[0]

    def test_a_corrupt_version_is_read_again_and_a_staged_one_is_not(self, log):
        stager, digest = Stager(area(), rank=0), log.manifest(1).digest
        path = log.folder(1) / "weights-00001.safetensors"
        sound = path.read_bytes()
        flip_a_byte(log, 1, FIRST)
        assert staged(stager, log, digest).corrupt is not None
        path.write_bytes(sound)
        assert staged(stager, log, digest).corrupt is None
        flip_a_byte(log, 1, FIRST)
        assert staged(stager, log, digest).corrupt is None  # it lies in the area since before
        stager.forget()
        assert staged(stager, log, digest).corrupt is not None

    def test_memory_that_is_not_there_is_a_reason_and_no_failure(self, log, monkeypatch):
        huge = torch.nn.Linear(1 << 29, 1 << 29, bias=False, device="meta")
        with pytest.raises(CannotStage, match=r"no 1152921\d+ bytes of memory to stage in"):
            StagingBuffer("host", huge, torch.device("cpu"))

        def refused(*_: object, **__: object) -> torch.Tensor:
            raise CannotStage("pinned memory is refused")

        stager = Stager(area(), rank=0)
        monkeypatch.setattr(module, "_allocate", refused)
        assert staged(stager, log) == StageAnswer(refused="pinned memory is refused")
        flip_a_byte(log, 1, FIRST)
        assert staged(stager, log).corrupt is not None


GB = 10**9


@pytest.mark.parametrize(
    ("size", "cache", "host", "ranks", "kind", "cost"),
    [
        (9.4, 62, 100, 1, "device", "device: 9.4 GB, 15% of the KV cache's 62.0 GB; "),
        (31.2, 86, 100, 1, "device", "36% of the KV cache's 86.0 GB"),
        (15.6, 56, 100, 2, "device", "28% of the KV cache's 56.0 GB"),
        (31.2, 41, 100, 1, "host", "76% of the KV cache's 41.0 GB; host: updates close the engine for 0.62 s)"),
        (31.2, 41, 30, 1, "none", "host: 31.2 GB of memory for each GPU of an engine, and 30.0 GB are free)"),
        (31.2, 56, 62, 2, "none", "62.0 GB are free)"),
        (70, -1, 100, 1, "host", "100% of the KV cache's 0.0 GB"),
    ],
)
def test_auto_takes_the_gpu_only_where_it_costs_little(size, cache, host, ranks, kind, cost):
    chosen, why = choose_staging(int(size * GB), int(cache * GB), int(host * GB), ranks)
    assert chosen == kind and why.startswith(f"engine.staging auto is {kind} (") and cost in why
