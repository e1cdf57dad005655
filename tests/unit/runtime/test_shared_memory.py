"""Memory that two processes share, where a system has it."""

import pytest

from rollout_service.runtime.shared_memory import SharedMemory


def test_a_system_without_it_raises_what_senders_catch(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(OSError, match="send the tensors in parts"):
        SharedMemory.create(1)
