"""Registered memory stays mapped until CUDA has forgotten it. An object stands in for CUDA's runtime."""

import gc
import mmap
import weakref

import pytest
import torch

from rollout_service.client._shared_memory import HostMemory
from rollout_service.gpu.pinning import pin, take_host_memory


class Cudart:
    def __init__(self) -> None:
        self.registered: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # CUDA's name
        assert nbytes > 0 and flags == 0
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return cudart


def test_memory_stays_mapped_until_it_is_unregistered(cudart):
    memory = take_host_memory(1 << 20)
    assert isinstance(memory.obj, mmap.mmap)
    mapped, unpin = weakref.ref(memory.obj), pin(memory)
    del memory
    gc.collect()
    assert mapped() is not None and len(cudart.registered) == 1
    unpin()
    gc.collect()
    assert mapped() is None and not cudart.registered


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "forgotten"])
def test_a_push_s_memory_is_unregistered(cudart, is_closed):
    memory = HostMemory(1 << 20)
    assert len(cudart.registered) == 1
    if is_closed:
        memory.close()
        memory.close()
        assert not cudart.registered
    del memory
    gc.collect()
    assert not cudart.registered
