"""Mapped files of a log in memory (on a tmpfs): versions are written, checked and copied to a GPU in place.

A process keeps the mapping of a file for as long as the file exists, even if it is renamed: ``SpareFiles`` reuses files
for later versions. With ``registered``, the memory is registered with CUDA, once per file. Linux allocates the pages of
new files in a tmpfs at 2.4 GB/s, and CUDA registers 3.6 GB/s, while a GPU then copies 55 GB/s (2 H200 of one host,
November 2026). Neither pays off for a file that is used once.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from rollout_service.store.durable_io import DISK_FULL, is_unlocked, remove_tree

logger = logging.getLogger(__name__)

_MAKING = ".spare-"
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""File systems in memory: nothing is written back, or read again, behind a mapping."""

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Error numbers of network file systems without locks. Their files are not reused."""
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
        memory, own = memoryview(mmap.mmap(fd, nbytes)), os.dup(fd)
        try:
            return _Mapping(memory, own, None if self._registered is None else self._registered(memory))
        except BaseException:
            os.close(own)
            raise


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


class SpareFiles:
    """Files of a log in memory for its next versions: created at the start, later taken from dropped versions.

    They are in ``<root>/spare``. Those of a dropped version replace all others there. Used by the log's only writer.
    Thread-safe.
    """

    def __init__(self, root: Path) -> None:
        """``root``: folder of the log."""
        self._folder = root / "spare"
        self._lock = threading.Lock()

    @staticmethod
    def are_kept_in(root: Path) -> bool:
        """Return True if the log's writer reuses files: readers then may map them."""
        return (root / "spare").is_dir() and is_in_memory(root)  # the folder may have been copied from another machine

    def begin(self) -> None:
        """Show readers that files are reused. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self._folder.parent.glob(f"{_MAKING}*"):  # left over from a process that was killed
            unfinished.unlink()

    def keep(self, dropped: Path) -> None:
        """Move the weights out of a dropped version's folder, and replace all spare files by them. Raises OSError.

        A file that is still read, or that a rolled back version shares, is left in place.
        """
        with self._lock:
            for path in self._folder.iterdir():
                path.unlink()
            for path in sorted(dropped.glob("*.safetensors")):
                # a process that opens it later notices the rename: see ``open_version_file``
                if path.stat().st_nlink > 1:
                    continue
                if is_unlocked(path):
                    path.rename(self._folder / uuid.uuid4().hex)
                else:
                    logger.info("%s is being read still, and is not used again", path)

    def take(self, nbytes: int, path: Path) -> bool:
        """Rename a spare file of that size to ``path``, with its old content; False without one. Raises OSError."""
        with self._lock:
            for kept in self._folder.iterdir():
                if kept.stat().st_size == nbytes:
                    kept.rename(path)
                    return True
        return False

    def make(self, sizes: Iterable[int], is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Create a file of each size in bytes that is missing, until memory is full. Raises OSError."""
        with self._lock:
            there = Counter(path.stat().st_size for path in self._folder.iterdir())
        for nbytes in sizes:
            if is_stopped():
                return
            if there[nbytes]:
                there[nbytes] -= 1
                continue
            # readers map all files in the folder, so create it elsewhere
            made = self._folder.parent / f"{_MAKING}{uuid.uuid4().hex}"
            fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                made.rename(self._folder / uuid.uuid4().hex)
            except OSError as error:
                made.unlink()
                if error.errno not in DISK_FULL:
                    raise
                logger.info("the next version takes new memory, and longer: %s", error)
                return
            finally:
                os.close(fd)

    def paths(self) -> Iterator[Path]:
        """Yield the files. Each may be taken for a version meanwhile. Raises OSError."""
        yield from self._folder.iterdir()

    def keep_only(self, sizes: Collection[int]) -> None:
        """Remove files of other sizes. Raises OSError."""
        with self._lock:
            for path in self._folder.iterdir():
                if path.stat().st_size not in sizes:
                    path.unlink()

    def remove(self) -> None:
        """Remove all spare files. Raises OSError."""
        with self._lock:
            remove_tree(self._folder)
