"""The lock of the only writer, and files that are read as they were written."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollout_service.errors import LogLocked
from rollout_service.store import durable_io
from rollout_service.store.durable_io import WriterLock, is_unlocked, lock_shared, no_room, remove_tree, write_sealed


@pytest.fixture
def has_opened(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a lock's file is open."""
    opened, require_own = threading.Event(), durable_io.require_own

    def set_opened(path: Path) -> None:
        require_own(path)
        opened.set()

    monkeypatch.setattr(durable_io, "require_own", set_opened)
    return opened


def test_a_lock_of_a_removed_folder_is_not_taken_twice(tmp_path, has_opened):
    root, acquired = tmp_path / "log", list[WriterLock]()
    before = WriterLock(root).acquire(0)
    has_opened.clear()
    waiting = threading.Thread(target=lambda: acquired.append(WriterLock(root).acquire(60)))
    waiting.start()
    assert has_opened.wait(60)
    remove_tree(root)
    before.release()
    waiting.join(60)
    with pytest.raises(LogLocked, match=f"is being written by process {os.getpid()}"):
        WriterLock(root).acquire(0)
    acquired[0].release()
    WriterLock(root).acquire(0).release()


def test_a_full_disk_leaves_the_lock_to_the_next_attempt(tmp_path, monkeypatch):
    def write_nothing(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", write_nothing)
        with pytest.raises(OSError, match="No space left"):
            WriterLock(tmp_path).acquire(0)
    WriterLock(tmp_path).acquire(0).release()


@pytest.mark.parametrize(("free", "why"), [(99, ""), (100, ", which whole blocks, a quota or another writer take up")])
def test_the_error_of_a_full_disk_does_not_contradict_itself(tmp_path, monkeypatch, free, why):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1000, 1000 - free, free))
    error = no_room("version 5", tmp_path, 100)
    assert error.message.startswith(f"version 5 needs 100 bytes, and {tmp_path} has {free} free{why}: make room there")


def test_a_file_system_without_locks_keeps_no_file_open(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(durable_io.fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    for lock in (lock_shared, is_unlocked, lambda folder: WriterLock(folder).acquire(0)):
        with pytest.raises(OSError, match="No locks"):
            lock(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_a_sealed_file_is_read_with_any_locale(tmp_path):
    write_sealed(tmp_path / "record", "schräg")
    code = "from pathlib import Path; from rollout_service.store.durable_io import read_sealed; "
    code += "print(ascii(read_sealed(Path('record'))))"
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": os.getcwd()}  # noqa: TID251 - of the child
    read = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=plain, capture_output=True, text=True)
    assert read.stdout == "'schr\\xe4g'\n", read.stderr
