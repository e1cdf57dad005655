"""Mapped files of a log in memory (on a tmpfs): versions are written, checked and copied to a GPU in place.

A process keeps the mapping of a file for as long as the file exists, even if it is renamed: ``SpareFiles`` reuses files
for later versions. With ``registered``, the memory is registered with CUDA, once per file. Linux allocates the pages of
new files in a tmpfs at 2.4 GB/s, and CUDA registers 3.6 GB/s, while a GPU then copies 55 GB/s (2 H200 of one host,
November 2026). Neither pays off for a file that is used once.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""File systems in memory: nothing is written back, or read again, behind a mapping."""

Registered = Callable[[memoryview], Callable[[], None]]
"""Registers memory with a device. Returns a function that unregisters it. Raises OSError."""


def is_in_memory(path: Path) -> bool:
    """Return True if a file or folder lies on a tmpfs. Raises OSError if it does not exist."""
    place = path.resolve(strict=True)
    while not place.is_mount():
        place = place.parent
    # of several mounts on one path, the last one is visible
    kinds = [mount.fstype for mount in psutil.disk_partitions(all=True) if mount.mountpoint == str(place)]
    return bool(kinds) and kinds[-1] in IN_MEMORY


_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Error numbers of network file systems without locks. Their files are not reused."""


class _Mapping(NamedTuple):
    memory: memoryview
    fd: int
    unregister: Callable[[], None] | None


class MappedFiles:
    """The mappings of one process. Thread-safe."""

    def __init__(self, registered: Registered | None = None) -> None:
        self._registered = registered
        self._held: dict[tuple[int, int], _Mapping] = {}
        self._lock = threading.Lock()

    @property
    def are_registered(self) -> bool:
        """Return True if files are registered with a device."""
        return self._registered is not None

    def of(self, fd: int) -> memoryview:
        """Return the bytes of an open file, for reading and writing. Raises OSError.

        The file must not shrink: Linux kills a process that reads a removed page.
        """
        stat = os.fstat(fd)
        with self._lock:
            held = self._held.get((stat.st_dev, stat.st_ino))
            if held is not None and held.memory.nbytes != stat.st_size:
                _unmap(self._held.pop((stat.st_dev, stat.st_ino)))
                held = None
            if held is None:
                held = self._held[stat.st_dev, stat.st_ino] = self._map(fd, stat.st_size)
            return held.memory

    def add(self, paths: Iterable[Path], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Map and register files before they are used. Raises OSError."""
        for path in paths:
            if is_stopped():
                return
            with contextlib.suppress(FileNotFoundError):  # it was taken for a version
                fd = os.open(path, os.O_RDWR)
                try:
                    self.of(fd)
                finally:
                    os.close(fd)

    def prune(self) -> None:
        """Unmap removed files. No copy from them to a device may be running."""
        with self._lock:
            for key, held in list(self._held.items()):
                if os.fstat(held.fd).st_nlink == 0:
                    del self._held[key]
                    _unmap(held)

    def close(self) -> None:
        """Unmap all files. No copy from them to a device may be running."""
        with self._lock:
            for held in self._held.values():
                _unmap(held)
            self._held = {}

    def _map(self, fd: int, nbytes: int) -> _Mapping:
        # the inode of a mapped file is not reused, so a mapping with this key is of the same file
        memory = memoryview(mmap.mmap(fd, nbytes))
        unregister = None if self._registered is None else self._registered(memory)
        return _Mapping(memory, os.dup(fd), unregister)


def _unmap(held: _Mapping) -> None:
    if held.unregister is not None:
        held.unregister()
    os.close(held.fd)  # the memory is unmapped with its last view


def close_version_file(fd: int) -> None:
    """Close a file of ``open_version_file``: it may be reused afterwards."""
    # unlock explicitly, because the lock belongs to all duplicates of the descriptor, including that of a mapping
    with contextlib.suppress(OSError):  # the file system has no locks
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def open_version_file(path: Path, *, writable: bool = False, locked: bool = True) -> int:
    """Open a file of a committed version for reading. The file is not reused before it is closed. Raises OSError.

    ``writable``: open it for mapping, since CUDA does not register read-only memory. ``locked``: False for a file of an
    upload, which its writer may reuse. Raises FileNotFoundError if its version was dropped meanwhile.
    """
    fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    if not locked:
        return fd
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            return fd
        raise FileNotFoundError(f"{path} was replaced while it was opened")
    except BlockingIOError:
        os.close(fd)
        raise FileNotFoundError(f"{path} was dropped while it was opened") from None
    except OSError:
        os.close(fd)
        raise
