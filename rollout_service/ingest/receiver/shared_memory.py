"""Memory that the receiver's process fills and the ingest reads."""

import mmap
import os
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Protocol


class SharedMemory:
    """A file without a name, mapped. It is freed when every process that has it has ended, however that is."""

    def __init__(self, fd: int | None = None) -> None:
        """``fd``: of another process's; None: make one, of no bytes."""
        self.fd = os.memfd_create("weight-transfer") if fd is None else fd
        self._map: mmap.mmap | None = None

    def __reduce__(self) -> tuple[Callable[["_Descriptor"], "SharedMemory"], tuple["_Descriptor"]]:
        """To a process that is being spawned goes the file itself."""
        return _from_descriptor, (DupFd(self.fd),)

    @property
    def nbytes(self) -> int:
        """Mapped here."""
        return 0 if self._map is None else len(self._map)

    def grow(self, nbytes: int) -> None:
        """Map at least ``nbytes``. What was mapped before lives on in its views. Raises OSError."""
        if nbytes <= self.nbytes:
            return
        if os.fstat(self.fd).st_size < nbytes:
            os.ftruncate(self.fd, nbytes)
        self._map = mmap.mmap(self.fd, nbytes)

    def view(self) -> memoryview:
        """All of it. Raises ValueError before ``grow``."""
        if self._map is None:
            raise ValueError("nothing is mapped yet")
        return memoryview(self._map)

    def close(self) -> None:
        """Close the file; views stay valid. Again does no harm."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self._map = -1, None


class _Descriptor(Protocol):
    """A file on its way to another process."""

    def detach(self) -> int: ...


def _from_descriptor(descriptor: _Descriptor) -> SharedMemory:
    return SharedMemory(descriptor.detach())
