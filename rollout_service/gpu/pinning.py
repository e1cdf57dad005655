"""Pinned memory: registered with CUDA, so that a GPU reads and writes it at PCIe speed."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable

logger = logging.getLogger(__name__)

_pinned: dict[int, memoryview] = {}
"""Address → registered memory, which therefore stays mapped. Otherwise CUDA would take later memory at the same address
for it, and would copy the bytes of the old pages to a GPU."""


def pin(memory: memoryview) -> Callable[[], None]:
    """Register memory with CUDA for the current device. Return a function that unregisters it.

    The memory stays mapped until that function succeeds. Raises OSError if CUDA refuses, and ValueError for read-only
    memory.
    """
    import numpy as np
    import torch

    if memory.readonly:
        raise ValueError("memory that is registered with CUDA must be writable")
    address, nbytes = np.frombuffer(memory, np.uint8).ctypes.data, memory.nbytes
    torch.cuda.init()
    cudart = torch.cuda.cudart()
    if failed := int(cudart.cudaHostRegister(address, nbytes, 0)):
        _forget_error()
        raise OSError(f"CUDA pins no {nbytes} bytes of shared memory: error {failed}")
    _pinned[address] = memory

    def unpin() -> None:
        if failed := int(cudart.cudaHostUnregister(address)):
            _forget_error()
            logger.warning("CUDA does not unpin %d bytes of shared memory: error %d; they stay mapped", nbytes, failed)
        else:
            _pinned.pop(address, None)

    return unpin


def _forget_error() -> None:
    """Clear the error of this thread's last CUDA call. Otherwise torch would raise it for the next kernel."""
    import ctypes

    import torch

    assert torch.version.cuda is not None, "torch has called CUDA"
    # the runtime that torch has loaded: cuda-bindings has a runtime, and a last error, of its own
    ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}").cudaGetLastError()


def take_host_memory(nbytes: int) -> memoryview:
    """Return new memory of ``nbytes``, at least one, with allocated pages. Releases the GIL meanwhile.

    Child processes do not inherit it: Linux would otherwise move pages to which a GPU writes.
    """
    import numpy as np

    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
    pages[:] = 0
    return memoryview(memory)


def pin_if_possible(memory: memoryview) -> Callable[[], None]:
    """Register memory like ``pin``; if CUDA refuses, use it unregistered, with a log message."""
    try:
        return pin(memory)
    except OSError as error:
        logger.warning("a GPU copies from and to this memory more slowly: %s", error)
        return lambda: None
