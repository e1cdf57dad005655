"""A log in memory: what a version was written into is written again by a later one, and never under a reader."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_service.protocol.tensors import TensorSlot
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, Recipe
from rollout_service.store.mapped_files import MappedFiles, SpareFiles, is_in_memory, open_version_file
from rollout_service.store.reading import VersionReader, pieces
from rollout_service.store.writer import LogMemory, VersionWriter

SIZES = {"a": 300_000, "b": 1_200_000, "c": 7}
SLOTS = [TensorSlot(name=name, dtype="float32", shape=(size,)) for name, size in SIZES.items()]
MAX_FILE_BYTES = 3 << 20


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def log(root: Path) -> WeightLog:
    return WeightLog(root)


@pytest.fixture
def memory(root: Path) -> LogMemory:
    memory = LogMemory.of(root, None)
    assert memory is not None
    return memory


def numbers(version: int, name: str) -> np.ndarray:
    return np.random.default_rng([version, len(name), ord(name)]).random(SIZES[name], dtype=np.float32)


def commit(log: WeightLog, memory: LogMemory, version: int) -> Manifest:
    folder = log.staging(version)
    folder.mkdir(parents=True)
    writer = VersionWriter(folder, Layout(SLOTS, MAX_FILE_BYTES), memory)
    for slot in SLOTS:
        writer.slot(slot.name)[:] = numbers(version, slot.name).view(np.uint8).data
        writer.filled(slot.name)
    manifest = Manifest(version=version, fingerprint="f", recipe=Recipe(weights="none"), tensors=writer.finish())
    log.commit(manifest, "keep")
    return manifest


def files_of(log: WeightLog, version: int) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in log.folder(version).glob("*.safetensors")}


def test_a_log_on_a_disk_has_no_memory(root, tmp_path):
    assert is_in_memory(root)
    if tmp_path.stat().st_dev == root.stat().st_dev:
        pytest.skip("temporary files lie in memory here")
    (tmp_path / "spare").mkdir()  # as in a copy of one that was in memory
    assert not is_in_memory(tmp_path) and not SpareFiles.are_kept_in(tmp_path)
    assert LogMemory.of(tmp_path, None) is None
    assert list(tmp_path.iterdir()) == []


def test_rooms_of_neighbours_in_a_file_are_one(log, memory):
    log.staging(1).mkdir(parents=True)
    writer = VersionWriter(log.staging(1), Layout(SLOTS, 2 * MAX_FILE_BYTES), memory)
    names = [slot.name for slot in SLOTS]
    joined = list(writer.contiguous_slots(map(writer.place, names)))
    assert sum(count for count, _ in joined) == len(names)
    assert len(joined) == len({path.name for path in log.staging(1).glob("*.safetensors")}) < len(names)
    assert [count for count, _ in writer.contiguous_slots(map(writer.place, names[::-1]))] == [1] * len(names)
    rest = iter(names)
    for count, slot in joined:
        slot[:] = b"".join(bytes([names.index(name)]) * writer.slot(name).nbytes for name in islice(rest, count))
    for number, name in enumerate(names):
        assert writer.slot(name) == bytes([number]) * writer.slot(name).nbytes
    writer.close()


def test_files_of_a_dropped_version_are_written_again_and_stay_mapped(log, memory):
    commit(log, memory, 1)
    inodes, mapped = files_of(log, 1), len(memory.mapped._held)
    commit(log, memory, 2)
    log.drop(1, memory.spare)
    third = commit(log, memory, 3)
    assert set(files_of(log, 3).values()) == set(inodes.values())
    assert len(memory.mapped._held) == 2 * mapped  # of versions 2 and 3
    log.verify(third)
    assert list((log.root / "spare").iterdir()) == []


def test_room_is_asked_for_only_where_pages_are_missing(log, memory, monkeypatch):
    for version in (1, 2):
        commit(log, memory, version)
    log.drop(1, memory.spare)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", no_room)
        commit(log, memory, 3)
        with pytest.raises(OSError, match="No space left"):
            commit(log, memory, 4)
    log.drop(2, memory.spare)
    sparse = max((log.root / "spare").iterdir(), key=lambda path: path.stat().st_size)
    size = sparse.stat().st_size
    os.truncate(sparse, size - (1 << 16))
    os.truncate(sparse, size)
    folder = log.staging(5)
    folder.mkdir(parents=True)
    VersionWriter(folder, Layout(SLOTS, MAX_FILE_BYTES), memory).close()
    for path in folder.iterdir():
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("shared_by", ["a reader", "a rolled back version"])
def test_a_file_that_is_in_use_is_not_written_again(log, memory, shared_by):
    first = commit(log, memory, 1)
    inodes, linked = set(files_of(log, 1).values()), log.root / "linked"
    linked.mkdir()
    with VersionReader(log.folder(1), first) if shared_by == "a reader" else nullcontext() as reader:
        if reader is None:
            for file in files_of(log, 1):
                os.link(log.folder(1) / file, linked / file)
        commit(log, memory, 2)
        log.drop(1, memory.spare)
        commit(log, memory, 3)
        with reader or VersionReader(linked, first) as still:
            buffer = memoryview(bytearray(8 << 20))
            for piece in pieces([(t, c) for t in first.tensors for c in t.chunks()], 8 << 20):
                still.read(piece, buffer)  # it checks them
    assert inodes.isdisjoint(files_of(log, 3).values())


def test_who_opens_a_file_of_a_version_that_is_dropped_meanwhile_is_told(log, memory, monkeypatch):
    first, lock = commit(log, memory, 1), fcntl.flock
    commit(log, memory, 2)

    def drop_and_lock(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        log.drop(1, memory.spare)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", drop_and_lock)
    with pytest.raises(FileNotFoundError):
        open_version_file(log.folder(1) / first.tensors[0].file)


def test_of_dropped_versions_the_last_is_kept_until_another_layout_needs_room(log, memory):
    for version in (1, 2, 3):
        commit(log, memory, version)
    inodes = files_of(log, 2)
    log.drop(1, memory.spare)
    log.drop(2, memory.spare)
    assert {path.stat().st_ino for path in memory.spare.paths()} == set(inodes.values())
    folder = log.staging(4)
    folder.mkdir(parents=True)
    VersionWriter(folder, Layout(SLOTS[:1]), memory).close()
    assert list(memory.spare.paths()) == []


def test_a_file_that_a_reader_has_mapped_is_written_again_once_it_is_closed(log, memory):
    first, mapped = commit(log, memory, 1), MappedFiles()
    inodes = set(files_of(log, 1).values())
    VersionReader(log.folder(1), first, mapped).close()
    commit(log, memory, 2)
    log.drop(1, memory.spare)
    third = commit(log, memory, 3)
    assert inodes == set(files_of(log, 3).values())
    [piece, *_] = pieces([(t, c) for t in third.tensors for c in t.chunks()], 1 << 20)
    held = len(mapped._held)
    with VersionReader(log.folder(3), third, mapped) as reader:
        assert (np.frombuffer(reader.view(piece), np.float32)[:1000] == numbers(3, "a")[:1000]).all()
    assert len(mapped._held) == held


class Registrations:
    """Counts what is registered and what is given back."""

    def __init__(self) -> None:
        self.open: list[int] = []

    def __call__(self, memory: memoryview):
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self.open.append(address)
        return lambda: self.open.remove(address)


def test_memory_is_registered_once_a_file_and_given_back_with_it(log, memory):
    registered = Registrations()
    mapped = MappedFiles(registered)
    for _ in range(2):
        manifest = commit(log, memory, 1) if not log.versions() else log.manifest(1)
        VersionReader(log.folder(1), manifest, mapped).close()
    assert len(registered.open) == len(files_of(log, 1))
    commit(log, memory, 2)
    mapped.prune()
    assert len(registered.open) == len(files_of(log, 1))
    log.drop(1)  # nobody keeps its files
    mapped.prune()
    assert registered.open == []


def test_what_cannot_be_registered_is_an_error_of_the_system(log, memory):
    manifest = commit(log, memory, 1)

    def refuse(_: memoryview):
        raise OSError("no more memory can be locked")

    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no more memory"):
        VersionReader(log.folder(1), manifest, MappedFiles(refuse))
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_made_spare_files_become_the_next_version(log, memory):
    commit(log, memory, 1)
    sizes = [path.stat().st_size for path in log.folder(1).glob("*.safetensors")]
    memory.spare.make(2 * sizes)
    memory.mapped.add(memory.spare.paths())
    made = {path.stat().st_ino for path in memory.spare.paths()}
    assert len(made) == 2 * len(sizes)
    memory.spare.make(2 * sizes)  # they are there
    assert {path.stat().st_ino for path in memory.spare.paths()} == made
    mapped = len(memory.mapped._held)
    second = commit(log, memory, 2)
    assert set(files_of(log, 2).values()) <= made and len(memory.mapped._held) == mapped
    assert len(list(memory.spare.paths())) == len(sizes)
    log.verify(second)


def test_making_spare_files_ends_where_memory_is_full(log, memory, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    memory.spare.make([100])
    assert list(memory.spare.paths()) == [] and list(log.root.glob(".spare-*")) == []
