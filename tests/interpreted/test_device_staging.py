"""A version that is staged on a GPU is hashed there, in the memory that it is moved to its place from."""

import random
from pathlib import Path

import pytest
import torch

from rollout_service.engine.loading import device_staging
from rollout_service.engine.loading.device_staging import copy_and_hash
from rollout_service.engine.loading.placement import Placement, Span
from rollout_service.errors import LogCorrupt
from rollout_service.store import manifest as manifest_module
from rollout_service.store import reading
from rollout_service.store.manifest import Manifest
from rollout_service.store.mapped_files import MappedFiles
from rollout_service.store.reading import VersionReader, pieces
from tests.unit.store.versions import written

CHUNK = 1000
TENSORS = {"first": (5, 7), "matrix": (60, 100), "small": (1, 20), "last": (30, 41)}


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Manifest, dict[str, bytes]]:
    for module in (manifest_module, reading):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(device_staging, "_QUEUED_PIECES", 2)  # so that each bounce buffer is used several times
    draw = random.Random(0)
    data = {name: draw.randbytes(rows * columns) for name, (rows, columns) in TENSORS.items()}
    tensors = {name: ("int8", shape, data[name]) for name, shape in TENSORS.items()}
    return tmp_path, written(tmp_path, tensors, version=3), data


def staged(folder: Path, manifest: Manifest, placement: Placement, *, every: bool) -> torch.Tensor:
    area = torch.zeros(placement.nbytes, dtype=torch.uint8)
    bounce_buffers = torch.zeros(3 * 2048, dtype=torch.uint8).split(2048)
    with VersionReader(folder, manifest, MappedFiles()) as reader:
        found = list(pieces(placement.chunks(manifest, every=every), 2048))
        assert len(found) > len(bounce_buffers)
        for batch, digests in copy_and_hash(reader, found, placement, area, bounce_buffers):
            reader.require([entry for piece in batch for entry in piece.chunks], digests)
    return area


def test_whole_tensors_and_parts_of_rows_are_packed(version):
    folder, manifest, data = version
    spans = [*Placement.whole(manifest).places, Span("matrix", 30, 40, 60, 100), Span("last", 41, 82)]
    placement = Placement(spans)
    area = staged(folder, manifest, placement, every=True)
    for span, start in placement.places.items():
        rows = [span.start + row * span.stride_bytes for row in range(span.rows)]
        wanted = b"".join(data[span.tensor][first : first + span.row_bytes] for first in rows)
        assert bytes(area[start : start + span.nbytes].tolist()) == wanted


@pytest.mark.parametrize(("name", "byte", "chunk"), [("first", 34, 0), ("matrix", 5999, 5), ("last", 1229, 1)])
def test_a_flipped_bit_anywhere_is_reported_by_name(version, name, byte, chunk):
    folder, manifest, _ = version
    tensor = next(tensor for tensor in manifest.tensors if tensor.name == name)
    data = bytearray((folder / tensor.file).read_bytes())
    data[tensor.offset + byte] ^= 1
    (folder / tensor.file).write_bytes(data)
    with pytest.raises(LogCorrupt, match=rf"version 3: {name} in .*: chunk {chunk} of") as error:
        staged(folder, manifest, Placement([Span("matrix", 0, 10)]), every=True)
    assert error.value.detail["tensor"] == name


def test_what_is_hashed_is_what_was_copied_and_not_the_file(version, monkeypatch):
    folder, manifest, _ = version
    real_copy = torch.Tensor.copy_

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        real_copy(target, source)
        if target.numel() > 1500:  # to a bounce buffer
            target[700] ^= 4
        return target

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    with pytest.raises(LogCorrupt, match="chunk"):
        staged(folder, manifest, Placement([Span("matrix", 0, 10)]), every=True)
