"""Read and write files without the page cache (``O_DIRECT``), where the file system supports it.

The parts of an upload are written once and read at most once. In the page cache, each 4 KiB would need a new page and
an extra disk write later, and parts would evict the versions that replicas read. If a file system refuses O_DIRECT, the
page cache is used.
"""

import errno
import fcntl
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Self

BLOCK_BYTES = 4096
"""Alignment of addresses, offsets and lengths. No disk needs larger blocks for O_DIRECT."""

_KEPT_BUFFER_BYTES = 256 << 20


def round_up(nbytes: int) -> int:
    """Round up to whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def block_buffer(nbytes: int) -> memoryview:
    """Return zeroed memory, aligned to ``BLOCK_BYTES``, of at least ``nbytes`` in whole blocks."""
    return memoryview(_map(nbytes))


class BufferPool:
    """Reusable buffers of ``limit_bytes`` in total: allocating new memory takes longer than the copy into it."""

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes
        self._free: list[mmap.mmap] = []
        self._lock = threading.RLock()  # reentrant: the finalizer of a buffer may run while this thread takes another

    def take(self, nbytes: int) -> memoryview | None:
        """Return an uninitialised buffer, aligned as by ``block_buffer``; None if the limit would be exceeded.

        The pool gets it back once nothing refers to this object, so do not keep a slice of it for longer.
        """
        with self._lock:
            memory = next((m for m in self._free if len(m) == round_up(nbytes)), None)
            if memory is not None:
                self._free.remove(memory)
            elif nbytes > self._left_bytes:
                return None
            else:
                self._left_bytes -= round_up(nbytes)
                memory = _map(nbytes)
        buffer = memoryview(memory)
        weakref.finalize(buffer, self._take_back, memory)
        return buffer

    def trim(self) -> None:
        """Free all unused memory."""
        with self._lock:
            self._left_bytes += sum(map(len, self._free))
            self._free = []

    def _take_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._free.append(memory)


class ThreadBuffers:
    """A block-aligned buffer for each thread, reused by its next ``take``; large ones are not kept."""

    def __init__(self) -> None:
        self._buffers = threading.local()

    def take(self, nbytes: int) -> memoryview:
        """Return at least ``nbytes`` of uninitialised memory, valid until this thread's next call."""
        kept: memoryview | None = getattr(self._buffers, "kept", None)
        if kept is not None and kept.nbytes >= nbytes:
            return kept
        buffer = block_buffer(nbytes)
        self._buffers.kept = buffer if buffer.nbytes <= _KEPT_BUFFER_BYTES else None
        return buffer


def _map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, max(round_up(nbytes), BLOCK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class DirectFile:
    """An open file and context manager, for one thread at a time. Every method raises OSError."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create an empty file for writing."""
        return cls(_open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file for reading."""
        return cls(_open(path, os.O_RDONLY))

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        """Write the first ``nbytes`` of a ``block_buffer`` at ``offset``. If ``nbytes`` is no multiple of a block, the
        file ends there.

        Only the end of a file may be no multiple of ``BLOCK_BYTES``.
        """
        done = 0
        while done < nbytes:
            try:
                done += os.pwrite(self._fd, buffer[done : round_up(nbytes)], offset + done)
            except OSError as error:
                self._use_the_cache(error)
        if nbytes % BLOCK_BYTES:
            os.ftruncate(self._fd, offset + nbytes)

    def read(self, buffer: memoryview, nbytes: int, offset: int) -> bool:
        """Fill ``buffer`` from ``offset``. Return True if at least ``nbytes`` were read.

        Reads through the page cache, unless the buffer is whole blocks of a ``block_buffer`` and ``offset`` is
        block-aligned.
        """
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                self._use_the_cache(error)
                continue
            if count == 0:
                return False
            done += count
        return True

    def sync(self) -> None:
        """Return once all written data is on disk."""
        os.fsync(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _use_the_cache(self, error: OSError) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        # a short write that ended inside a block also leads here, since the rest is not aligned
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise error
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)
