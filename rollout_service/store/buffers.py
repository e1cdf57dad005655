"""Reusable memory for parts and tensors: allocating new memory takes longer than the copy into it."""

import mmap
import threading
import weakref

from rollout_service.store.mapped_files import Registered

_PAGE_BYTES = mmap.PAGESIZE

_KEPT_BUFFER_BYTES = 256 << 20


def round_up(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


class BufferPool:
    """Reusable buffers."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.RLock()  # reentrant: the finalizer of a buffer may run while this thread takes another

    def take(self, nbytes: int) -> memoryview:
        """Return an uninitialised buffer of whole pages, at least ``nbytes``.

        The pool gets it back once nothing refers to this object, so do not keep a slice of it for longer.
        """
        with self._lock:
            memory = next((m for m in self._free if len(m) == round_up(nbytes)), None)
            if memory is None:
                memory = _map(nbytes)
            else:
                self._free.remove(memory)
        buffer = memoryview(memory)
        weakref.finalize(buffer, self._take_back, memory)
        return buffer

    def _take_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._free.append(memory)


class ThreadBuffers:
    """A page-aligned buffer for each thread, reused by its next ``take``; large ones are not kept."""

    def __init__(self, registered: Registered | None = None) -> None:
        """``registered``: registers buffers that are kept with a GPU; their threads must outlive the use of the GPU."""
        self._buffers, self._registered = threading.local(), registered

    def take(self, nbytes: int) -> memoryview:
        """Return at least ``nbytes`` of uninitialised memory, valid until this thread's next call."""
        kept: memoryview | None = getattr(self._buffers, "kept", None)
        if kept is not None and kept.nbytes >= nbytes:
            return kept
        buffer = memoryview(_map(nbytes))
        if buffer.nbytes > _KEPT_BUFFER_BYTES:
            return buffer
        if self._registered is not None:
            if kept is not None:
                self._buffers.unregister()
            self._buffers.unregister = self._registered(buffer)
        self._buffers.kept = buffer
        return buffer


def _map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, max(round_up(nbytes), _PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
