"""Memory that two processes share, filled by one in batches and given back by the other in the same order."""

import mmap
import os
from collections import deque
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Protocol

_ALIGNMENT = 64
"""Tensors of any dtype may begin at its multiples."""


def aligned(nbytes: int) -> int:
    """The next multiple of 64."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


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


class Ring:
    """Which ranges of ``nbytes`` are taken: batches, one after the other, given back in their order."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> int | None:
        """The first byte of a range; None while there is no room for it. Raises ValueError if there never is."""
        size = aligned(max(nbytes, 1))
        if size > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit into {self.nbytes}")
        start = self._free_start(size)
        if start is not None:
            self._taken.append((start, start + size))
        return start

    def _free_start(self, size: int) -> int | None:
        if not self._taken:
            return 0
        oldest, newest_end = self._taken[0][0], self._taken[-1][1]
        if newest_end <= oldest:  # it has wrapped around: what is free lies between
            return newest_end if newest_end + size <= oldest else None
        if newest_end + size <= self.nbytes:
            return newest_end
        return 0 if size <= oldest else None

    def give_back(self, batches: int) -> None:
        """The oldest ones."""
        for _ in range(batches):
            self._taken.popleft()
