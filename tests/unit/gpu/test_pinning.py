"""Registered memory stays mapped until CUDA has forgotten it. An object stands in for CUDA's runtime."""

import ctypes
import gc
import mmap
import weakref

import pytest
import torch

from rollout_service.client._shared_memory import HostMemory
from rollout_service.gpu import pinning
from rollout_service.gpu.pinning import pin, pin_if_possible, take_host_memory

ALREADY_REGISTERED, NOT_REGISTERED, ILLEGAL_ADDRESS = 712, 713, 700


class Cudart:
    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.last_error = 0
        """torch raises it for the next kernel, unless it is cleared."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # CUDA's name
        assert nbytes > 0 and flags == 0
        self.last_error = ALREADY_REGISTERED if address in self.registered else self.last_error
        self.registered.add(address)
        return self.last_error

    def cudaHostUnregister(self, address: int) -> int:
        self.last_error = self.last_error if address in self.registered else NOT_REGISTERED
        self.registered.discard(address)
        return self.last_error

    def cudaGetLastError(self) -> int:
        last, self.last_error = self.last_error, 0
        return last


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", {"libcudart.so.13": cudart}.__getitem__)
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


def test_memory_that_cuda_does_not_unregister_stays_mapped(cudart, monkeypatch):
    monkeypatch.setattr(pinning, "_pinned", {})
    memory = take_host_memory(1 << 20)
    mapped, unpin = weakref.ref(memory.obj), pin(memory)
    del memory
    cudart.last_error = ILLEGAL_ADDRESS
    unpin()
    gc.collect()
    assert mapped() is not None


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


def test_an_error_of_pinning_is_not_left_to_the_next_kernel(cudart, caplog):
    memory = take_host_memory(1 << 20)
    unpin = pin(memory)
    with pytest.raises(OSError, match=f"pins no 1048576 bytes .* error {ALREADY_REGISTERED}"):
        pin(memory)
    assert cudart.last_error == 0
    pin_if_possible(memory)()
    assert cudart.last_error == 0 and "more slowly" in caplog.text
    unpin()
    assert not caplog.text.count("does not unpin")
    unpin()
    assert cudart.last_error == 0 and "does not unpin 1048576 bytes of shared memory: error 713" in caplog.text
