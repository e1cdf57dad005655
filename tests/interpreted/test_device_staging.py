"""A version that is staged on a GPU is hashed there, in the memory that it is moved to its place from."""

import random
from pathlib import Path

import pytest
import torch

from rollout_service.engine.loading import device_staging
from rollout_service.engine.loading.device_staging import stage_on_device
from rollout_service.engine.loading.placement import Placement, Span
from rollout_service.errors import LogCorrupt
from rollout_service.protocol.tensors import TensorSlot
from rollout_service.store import manifest as manifest_module
from rollout_service.store import reading
from rollout_service.store.layout import Layout
from rollout_service.store.manifest import Manifest, Recipe
from rollout_service.store.mapped_files import MappedFiles
from rollout_service.store.reading import VersionReader, pieces
from rollout_service.store.writer import VersionWriter

CHUNK = 1000
TENSORS = {"first": (5, 7), "matrix": (60, 100), "small": (1, 20), "last": (30, 41)}


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Manifest, dict[str, bytes]]:
    for module in (manifest_module, reading):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(device_staging, "_QUEUED_PIECES", 2)  # so that each bounce buffer is used several times
    draw = random.Random(0)
    data = {name: draw.randbytes(rows * columns) for name, (rows, columns) in TENSORS.items()}
    writer = VersionWriter(
        tmp_path, Layout([TensorSlot(name=name, dtype="int8", shape=shape) for name, shape in TENSORS.items()])
    )
    for name, held in data.items():
        writer.write(name, memoryview(held))
    return tmp_path, Manifest(version=3, fingerprint="", recipe=Recipe(weights="none"), tensors=writer.finish()), data


def staged(folder: Path, manifest: Manifest, placement: Placement, *, every: bool) -> torch.Tensor:
    area = torch.zeros(placement.nbytes, dtype=torch.uint8)
    bounce_buffers = torch.zeros(3 * 2048, dtype=torch.uint8).split(2048)
    with VersionReader(folder, manifest, MappedFiles()) as reader:
        found = list(pieces(placement.chunks(manifest, every=every), 2048))
        assert len(found) > len(bounce_buffers)
        stage_on_device(reader, found, placement, area, bounce_buffers)
    return area


def flip(folder: Path, manifest: Manifest, name: str, byte: int) -> None:
    tensor = next(tensor for tensor in manifest.tensors if tensor.name == name)
    with (folder / tensor.file).open("r+b") as file:
        file.seek(tensor.offset + byte)
        old = file.read(1)[0]
        file.seek(tensor.offset + byte)
        file.write(bytes([old ^ 1]))


def test_whole_tensors_lie_in_the_area(version):
    folder, manifest, data = version
    placement = Placement.whole(manifest)
    area = staged(folder, manifest, placement, every=False)
    for span, start in placement.places.items():
        assert bytes(area[start : start + span.nbytes].tolist()) == data[span.tensor]


def test_parts_of_rows_are_packed(version):
    folder, manifest, data = version
    placement = Placement([Span("matrix", 30, 40, 60, 100), Span("last", 41, 82)])
    area = staged(folder, manifest, placement, every=True)
    matrix = torch.frombuffer(bytearray(data["matrix"]), dtype=torch.uint8).view(60, 100)
    assert torch.equal(area[: 60 * 40].view(60, 40), matrix[:, 30:70])
    assert bytes(area[2400 : 2400 + 82].tolist()) == data["last"][41:123]


@pytest.mark.parametrize(
    ("name", "byte", "chunk"),
    [("first", 34, 0), ("matrix", 0, 0), ("matrix", 5999, 5), ("small", 3, 0), ("last", 1229, 1)],
)
def test_a_flipped_bit_anywhere_is_reported_by_name(version, name, byte, chunk):
    folder, manifest, _ = version
    flip(folder, manifest, name, byte)
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
