"""Memory that two processes of a machine share: an unnamed file (``memfd_create``).

It cannot shrink, since that would kill processes that have it mapped. It is freed when its last process has ended, in
whatever way. The other process opens it as ``/proc/<process>/fd/<number>``, which the kernel allows to processes of the
same user.
"""

import fcntl
import mmap
import os
import uuid
import weakref
from pathlib import Path
from typing import Self

_NAME = "rollout-weights-"


def machine() -> str:
    """Return an id that all processes of a machine share, also in containers, until it is booted again. Raises
    OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class SharedMemory:
    """A mapping in one process; ``view`` is all of it. Pages are allocated when they are first written."""

    def __init__(self, fd: int, name: str) -> None:
        """``fd`` is closed with this object. Raises OSError."""
        self._fd, self.name = fd, name
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.view = memoryview(self._map)
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """Create memory of that size. Raises OSError, also on systems without such memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("no memory can be shared: only Linux has memfd_create; send the tensors in parts")
        name = uuid.uuid4().hex
        fd = os.memfd_create(_NAME + name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, name)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def open(cls, process: int, descriptor: int, name: str) -> Self:
        """Open another process's memory. Raises OSError if it does not exist, belongs to another user, is empty, or can
        shrink."""
        link = f"/proc/{process}/fd/{descriptor}"
        _require(link, name)
        fd = os.open(link, os.O_RDWR | os.O_CLOEXEC)
        try:
            _require(f"/proc/self/fd/{fd}", name)  # the process may have opened another file as this number meanwhile
            if not os.fstat(fd).st_size:
                raise OSError(f"the memory {name} is empty")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(f"the memory {name} can shrink")
            return cls(fd, name)
        except OSError:
            os.close(fd)
            raise

    @property
    def descriptor(self) -> int:
        """File descriptor in this process."""
        return self._fd

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.view.nbytes

    def close(self) -> None:
        """Close the file; memory that views refer to stays mapped. May be called again."""
        self._close()
        self._fd = -1


def _require(link: str, name: str) -> None:
    """Raise FileNotFoundError unless a link in /proc is to the memory of this name."""
    if (found := os.readlink(link)) != f"/memfd:{_NAME}{name} (deleted)":
        raise FileNotFoundError(f"{link} is {found}, and not the memory {name}")
