"""Files around the page cache hold what was written, on any file system and at any length."""

import gc
import random
from pathlib import Path

import pytest

from rollout_service.store.direct_io import BLOCK_BYTES, BufferPool, DirectFile, block_buffer

FOLDERS = ["disk", "memory"]
"""A folder of the disk, and one of a file system that may refuse O_DIRECT."""


@pytest.fixture(params=FOLDERS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "memory":
        tmp_path = Path("/dev/shm") / tmp_path.name
        tmp_path.mkdir()
        request.addfinalizer(lambda: [*map(Path.unlink, tmp_path.iterdir()), tmp_path.rmdir()])
    return tmp_path / "file"


@pytest.mark.parametrize("nbytes", [1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 7])
@pytest.mark.parametrize("piece", [BLOCK_BYTES, 2 * BLOCK_BYTES])
def test_a_file_holds_the_bytes_that_were_written_and_no_more(path: Path, nbytes: int, piece: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    buffer = block_buffer(piece)
    with DirectFile.create(path) as file:
        for start in range(0, nbytes, piece):
            part = data[start : start + piece]
            buffer[: len(part)] = part
            file.write(buffer, len(part), start)
    assert path.read_bytes() == data
    whole = block_buffer(nbytes)
    with DirectFile.open(path) as file:
        assert file.read(whole, nbytes, 0)
        assert not file.read(block_buffer(BLOCK_BYTES), BLOCK_BYTES, 8 * BLOCK_BYTES)
    assert whole[:nbytes] == data


def test_what_is_no_whole_block_is_read_through_the_cache(path: Path) -> None:
    data = random.Random(0).randbytes(3 * BLOCK_BYTES)
    path.write_bytes(data)
    target = bytearray(100)
    with DirectFile.open(path) as file:
        assert file.read(memoryview(target), 100, 4321)
    assert target == data[4321:4421]


def test_a_pool_respects_its_limit_and_reuses_freed_memory() -> None:
    pool = BufferPool(2 * BLOCK_BYTES)
    first, second = pool.take(BLOCK_BYTES), pool.take(10)
    assert first is not None and second is not None and pool.take(1) is None
    first[:5] = b"first"
    del first
    gc.collect()
    again = pool.take(BLOCK_BYTES)
    assert again is not None and again[:5] == b"first" and pool.take(1) is None


def test_a_trimmed_pool_has_room_for_buffers_of_another_size() -> None:
    pool = BufferPool(2 * BLOCK_BYTES)
    small = pool.take(BLOCK_BYTES)
    del small
    gc.collect()
    assert pool.take(2 * BLOCK_BYTES) is None
    pool.trim()
    assert pool.take(2 * BLOCK_BYTES) is not None
