"""The file of an upload: received into, read, and kept in a tmpfs for the next upload."""

import errno
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout_service.store import staged_file
from rollout_service.store.staged_file import StagedFile, StagingSpace
from tests.unit.ingest.faults import fail


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def space(memory: Path) -> StagingSpace:
    return StagingSpace(memory / "kept")


def fill(file: StagedFile, data: bytes) -> None:
    room = file.memory(0, len(data))
    assert room is not None
    room[:] = data


def test_received_bytes_are_in_a_mapped_file_without_a_write(space, memory):
    file = space.open(memory / "1", 5000)
    assert file.allocated_bytes == 0
    fill(file, b"abcde" * 800)
    assert (memory / "1").read_bytes() == b"abcde" * 800 + bytes(1000)
    assert bytes(file.read(3, 4)) == b"deab" and 4000 <= file.allocated_bytes <= 8192
    space.release(file, keep=False)
    assert not (memory / "1").exists()


def test_a_released_file_is_that_of_the_next_upload_of_its_size(space, memory):
    first = space.open(memory / "1", 8)
    fill(first, b"12345678")
    space.release(first, keep=True)
    space.release(space.open(memory / "0", 0), keep=True)  # an upload without bytes leaves it
    assert [path.name for path in memory.iterdir()] == ["kept"]
    assert space.open(memory / "2", 8) is first
    assert first.path == memory / "2" and (memory / "2").read_bytes() == b"12345678"
    space.release(first, keep=True)
    third = space.open(memory / "3", 9)
    assert third is not first and not (memory / "kept").exists()
    space.release(third, keep=True)
    assert (memory / "kept").stat().st_size == 9


def test_a_kept_file_makes_room_for_others(space, memory):
    space.release(space.open(memory / "1", 4096), keep=True)
    space.make_room(memory, 4096)
    assert (memory / "kept").exists()
    space.make_room(memory, 1 << 60)
    assert not (memory / "kept").exists()


def test_a_kept_file_is_registered_until_it_is_removed(memory, monkeypatch):
    registered: list[int] = []

    def register(part: memoryview) -> Callable[[], None]:
        registered.append(part.nbytes)
        return lambda: registered.remove(part.nbytes)

    monkeypatch.setattr(staged_file, "WINDOW_BYTES", 8)
    space = StagingSpace(memory / "kept", register)
    file = space.open(memory / "1", 20)
    assert not file.is_registered(0, 8)
    space.release(file, keep=True)
    assert space.open(memory / "2", 20) is file
    space.release(file, keep=False)
    assert registered == []
    again = space.open(memory / "3", 20)
    space.release(again, keep=True)
    space.close()  # waits for the thread that registers
    assert registered == []


def test_memory_that_cannot_be_registered_is_used_as_it_is(memory, caplog):
    def refuse(part: memoryview) -> Callable[[], None]:
        raise OSError("no room")

    space = StagingSpace(memory / "kept", refuse)
    for number in range(3):
        file = space.open(memory / str(number), 8)
        fill(file, b"12345678")
        assert not file.is_registered(0, 8)
        space.release(file, keep=True)
    space.close()
    assert caplog.text.count("no room") == 1


def test_a_file_that_cannot_be_kept_is_removed(space, memory, monkeypatch):
    file = space.open(memory / "1", 8)
    fail(monkeypatch, Path, "rename", errno.ENOSPC)
    space.release(file, keep=True)
    assert list(memory.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        file.descriptor()


def test_a_disk_keeps_nothing(tmp_path):
    space = StagingSpace()
    file = space.open(tmp_path / "1", 100)
    assert file.memory(0, 100) is None
    (tmp_path / "1").write_bytes(b"x" * 100)
    assert bytes(file.read(90, 10)) == b"x" * 10
    space.release(file, keep=True)
    assert list(tmp_path.iterdir()) == []
