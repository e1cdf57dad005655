"""Memory that two processes share, where a system has it."""

import os
from typing import Any

import pytest

from rollout_service.runtime.shared_memory import SharedMemory


def test_a_system_without_it_raises_what_senders_catch(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(OSError, match="send the tensors in parts"):
        SharedMemory.create(1)


def test_memory_that_is_replaced_while_it_is_opened_is_refused(monkeypatch, tmp_path):
    memory = SharedMemory.create(1)
    open_file = os.open

    def replace_and_open(path: Any, flags: int) -> int:
        other = open_file(tmp_path / "other", os.O_RDWR | os.O_CREAT)
        os.dup2(other, memory.descriptor)
        os.close(other)
        return open_file(path, flags)

    monkeypatch.setattr("os.open", replace_and_open)
    with pytest.raises(FileNotFoundError, match="and not the memory"):
        SharedMemory.open(os.getpid(), memory.descriptor, memory.name)


def test_empty_memory_is_refused_and_closed():
    fd, opened = os.memfd_create("rollout-weights-x"), set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="is empty"):
        SharedMemory.open(os.getpid(), fd, "x")
    assert set(os.listdir("/proc/self/fd")) == opened
    os.close(fd)
