"""What is read of a version is checked where it lies, piece by piece or tensor by tensor."""

import random
from pathlib import Path

import pytest

from rollout_service.errors import LogCorrupt
from rollout_service.store.log import verify_tensors
from rollout_service.store.manifest import CHUNK_BYTES, Manifest, StoredTensor
from rollout_service.store.reading import VersionReader, pieces
from tests.unit.store.versions import written

SIZES = (5, CHUNK_BYTES + 3, 0, 7)


@pytest.fixture
def version(tmp_path: Path) -> tuple[Path, Manifest, bytes]:
    """Folder, manifest, and the bytes of the tensors in their order."""
    parts = [random.Random(size).randbytes(size) for size in SIZES]
    tensors = {f"t{i}": ("float8_e4m3fn", (len(part),), part) for i, part in enumerate(parts)}
    return tmp_path, written(tmp_path, tensors), b"".join(parts)


def all_chunks(manifest: Manifest) -> list[tuple[StoredTensor, object]]:
    return [(tensor, chunk) for tensor in manifest.tensors for chunk in tensor.chunks()]


@pytest.mark.parametrize("most_bytes", [1, CHUNK_BYTES + 6, 1 << 30])
def test_the_pieces_are_all_bytes_in_order(version, most_bytes):
    folder, manifest, data = version
    found, read = list(pieces(all_chunks(manifest), most_bytes)), b""
    with VersionReader(folder, manifest) as reader:
        for piece in found:
            memory = bytearray(piece.nbytes + 3)
            reader.read(piece, memoryview(memory))
            read += memory[: piece.nbytes]
    assert read == data
    assert len(found) == {1: 5, CHUNK_BYTES + 6: 2, 1 << 30: 1}[most_bytes]


def test_every_flipped_byte_is_found_by_either_way_of_reading(version):
    folder, manifest, data = version
    path = folder / manifest.tensors[0].file
    sound, start = path.read_bytes(), manifest.tensors[0].offset
    for position, tensor, chunk in ((2, 0, 0), (5, 1, 0), (4 + CHUNK_BYTES, 1, 0), (5 + CHUNK_BYTES, 1, 1), (-1, 3, 0)):
        place = start + position % len(data)
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises(LogCorrupt) as found:
            verify_tensors(manifest, folder)
        assert (found.value.detail["tensor"], found.value.detail["chunk"]) == (f"t{tensor}", chunk)
        with VersionReader(folder, manifest) as reader, pytest.raises(LogCorrupt) as again:
            for piece in pieces(all_chunks(manifest), 1 << 30):
                reader.read(piece, memoryview(bytearray(piece.nbytes)))
        assert again.value.message == found.value.message


def test_a_small_buffer_checks_a_large_tensor(version):
    folder, manifest, _ = version
    with VersionReader(folder, manifest) as reader:
        assert reader.check(manifest.tensors[1], memoryview(bytearray(1000))) == SIZES[1]
