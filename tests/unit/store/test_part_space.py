"""Files of parts in memory (a tmpfs) are used again, and never taken for what they held before."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout_service.store.part_space import DiskSpace, MappedSpace, received

MEMORY = Path("/dev/shm")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in a tmpfs."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


@pytest.fixture
def space(memory: Path) -> MappedSpace:
    return MappedSpace(memory / "kept")


def take_in(space: MappedSpace, folder: Path, part: int, data: bytes) -> Path:
    """As the listener does it. Returns the part's file."""
    folder.mkdir(exist_ok=True)
    path, whole = folder / f"part-{part:06d}.{'f' * 32}.incoming", folder / f"part-{part:06d}.{'0' * 32}"
    with received(space, path, len(data)) as incoming:
        assert incoming.memory is not None and incoming.file is None
        incoming.memory[:] = data
        path.rename(whole)
    return whole


def test_what_is_received_is_in_the_file_without_a_write(space: MappedSpace, memory: Path) -> None:
    assert take_in(space, memory / "1.parts", 0, b"abc" * 1000).read_bytes() == b"abc" * 1000


def test_files_of_an_upload_that_has_ended_are_those_of_the_next(space: MappedSpace, memory: Path) -> None:
    folders = memory / "1.parts", memory / "2.parts"
    first = {take_in(space, folders[0], part, bytes([part]) * size).stat().st_ino for part, size in [(0, 8), (1, 5)]}
    space.release_all(folders[0], keep_bytes=13)
    assert not folders[0].exists() and space.kept_bytes == 13
    second = {take_in(space, folders[1], part, bytes([9]) * size).stat().st_ino for part, size in [(0, 8), (1, 5)]}
    assert second == first and space.kept_bytes == 0
    assert sorted(path.read_bytes() for path in folders[1].iterdir()) == [b"\t" * 5, b"\t" * 8]


def test_no_more_is_kept_than_the_last_upload_had(space: MappedSpace, memory: Path) -> None:
    for part in range(4):
        take_in(space, memory / "1.parts", part, bytes(8))
    space.release_all(memory / "1.parts", keep_bytes=32)
    take_in(space, memory / "2.parts", 0, bytes(5))  # the parts have another size now
    space.release_all(memory / "2.parts", keep_bytes=5)
    assert space.kept_bytes == 5 and len(list((memory / "kept").iterdir())) == 1


def test_a_part_that_was_not_taken_is_kept_for_another(space: MappedSpace, memory: Path) -> None:
    memory.joinpath("1.parts").mkdir()
    path = memory / "1.parts" / "part-000000.x.incoming"
    with pytest.raises(ValueError, match="cut off"), received(space, path, 8):
        raise ValueError("cut off")
    assert not path.exists() and space.kept_bytes == 8


def test_a_file_that_is_still_received_into_goes_to_nobody_else(space: MappedSpace, memory: Path) -> None:
    folder = memory / "1.parts"
    folder.mkdir()
    with received(space, folder / "part-000000.x.incoming", 8):
        space.release_all(folder, keep_bytes=100)
        assert space.kept_bytes == 0
    assert space.kept_bytes == 0 and not folder.exists()


def test_memory_is_registered_when_it_is_used_again_and_until_its_file_is_removed(memory: Path) -> None:
    registered: list[int] = []

    def register(part: memoryview) -> Callable[[], None]:
        registered.append(part.nbytes)
        return lambda: registered.remove(part.nbytes)

    space = MappedSpace(memory / "kept", register)
    for upload in range(3):
        take_in(space, memory / "1.parts", 0, bytes(8))
        assert registered == [8][:upload]
        space.release_all(memory / "1.parts", keep_bytes=8)
    space.release_all(memory / "2.parts", keep_bytes=0)
    assert registered == []


def test_memory_that_cannot_be_registered_is_used_as_it_is(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(part: memoryview) -> Callable[[], None]:
        raise OSError("no room")

    space = MappedSpace(memory / "kept", refuse)
    for _ in range(3):
        assert take_in(space, memory / "1.parts", 0, b"12345678").read_bytes() == b"12345678"
        space.release_all(memory / "1.parts", keep_bytes=8)
    assert caplog.text.count("no room") == 1


def test_what_is_kept_makes_room_for_what_needs_it(space: MappedSpace, memory: Path) -> None:
    take_in(space, memory / "1.parts", 0, bytes(4096))
    space.release_all(memory / "1.parts", keep_bytes=4096)
    space.make_room(memory, 4096)
    assert space.kept_bytes == 4096
    space.make_room(memory, 1 << 60)
    assert space.kept_bytes == 0 and not (memory / "kept").exists()


def test_a_disk_keeps_nothing(tmp_path: Path) -> None:
    space, path = DiskSpace(1 << 20), tmp_path / "1.parts" / "part-000000"
    path.parent.mkdir()
    with received(space, path, 100) as incoming:
        assert incoming.file is not None and incoming.memory is not None
        incoming.write(incoming.memory[:100])
        path.rename(path.with_name("whole"))
    assert path.with_name("whole").stat().st_size == 100
    space.release_all(path.parent, keep_bytes=100)
    assert not path.parent.exists() and space.kept_bytes == 0
