"""Memory that the receiver process fills and the ingest reads."""

import mmap
import os
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Protocol


class SharedMemory:
    """An unnamed, mapped file. The kernel frees it once every process that has it has ended, in whatever way."""

    def __init__(self, fd: int | None = None) -> None:
        """``fd``: a file of another process; None: create an empty one."""
        self.fd = os.memfd_create("weight-transfer") if fd is None else fd
        self._map: mmap.mmap | None = None

    def __reduce__(self) -> tuple[Callable[["_Descriptor"], "SharedMemory"], tuple["_Descriptor"]]:
        """Pass the file descriptor itself to a process that is being spawned."""
        return _from_descriptor, (DupFd(self.fd),)

    @property
    def nbytes(self) -> int:
        """Return the mapped size in bytes."""
        return 0 if self._map is None else len(self._map)

    def grow(self, nbytes: int) -> None:
        """Map at least ``nbytes``. Earlier views stay valid. Raises OSError."""
        if nbytes <= self.nbytes:
            return
        if os.fstat(self.fd).st_size < nbytes:
            os.ftruncate(self.fd, nbytes)
        self._map = mmap.mmap(self.fd, nbytes)

    def view(self) -> memoryview:
        """Return all of the memory. Raises ValueError before ``grow``."""
        if self._map is None:
            raise ValueError("nothing is mapped yet")
        return memoryview(self._map)

    def close(self) -> None:
        """Close the file; views stay valid. May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self._map = -1, None


class _Descriptor(Protocol):
    """A file descriptor that is being sent to another process."""

    def detach(self) -> int: ...


def _from_descriptor(descriptor: _Descriptor) -> SharedMemory:
    return SharedMemory(descriptor.detach())
