"""The file that holds the bytes of one upload until they are converted.

Each part is received at its offset in the file. A tensor therefore lies in one piece, whichever parts it comes in.

In memory (a tmpfs), the file is mapped: parts are received into it and tensors are read from it without a copy. Linux
allocates new pages of a tmpfs at 2.4 GB/s with any number of threads (2 H200, 32 cores, November 2026), a fraction of
the sockets' speed. The file of a finished upload is therefore kept, mapped, for the next one.
"""

import logging
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from rollout_service.store.buffers import ThreadBuffers
from rollout_service.store.durable_io import remove_tree
from rollout_service.store.mapped_files import Registered
from rollout_service.store.reading import read_at

logger = logging.getLogger(__name__)
WINDOW_BYTES = 256 << 20
"""Bytes that are registered with a GPU in one call, which stops other threads from mapping memory."""


class StagedFile:
    """One upload's file. Thread-safe for different ranges."""

    def __init__(self, path: Path, nbytes: int, *, is_mapped: bool) -> None:
        """Open the file, or create it without pages. Raises OSError."""
        self.path, self.nbytes, self.is_mapped = path, nbytes, is_mapped
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._memory: memoryview | None = None
        try:
            if os.fstat(self._fd).st_size != nbytes:
                os.ftruncate(self._fd, nbytes)
            if is_mapped and nbytes:
                self._memory = memoryview(mmap.mmap(self._fd, nbytes))
        except OSError:
            os.close(self._fd)
            raise
        self._buffers, self._lock = ThreadBuffers(), threading.Lock()
        self._registering: Future[None] | None = None
        self._unregister: list[Callable[[], None]] = []
        self._is_closed = False

    @property
    def allocated_bytes(self) -> int:
        """Return the size in bytes of the pages that the file has."""
        return os.fstat(self._fd).st_blocks * 512

    def memory(self, offset: int, nbytes: int) -> memoryview | None:
        """Return a range for receiving, with its pages allocated; None if the file is not mapped. Raises OSError."""
        with self._lock:  # the descriptor may be closed meanwhile
            if self._memory is None:
                return None
            if self.allocated_bytes < self.nbytes:
                # if there is no space this raises an error, while a later write would kill the process with a signal
                os.posix_fallocate(self._fd, offset, nbytes)
            return self._memory[offset : offset + nbytes]

    def descriptor(self) -> int:
        """Return a new descriptor for writing, which the caller closes. Raises FileNotFoundError once closed, OSError.

        The path may already name the file of another upload of this version.
        """
        with self._lock:
            if self._is_closed:
                raise FileNotFoundError(f"{self.path} was closed: its upload is over")
            return os.dup(self._fd)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a range, as aligned as in the file. If the file is not mapped, this thread's next call overwrites it.

        Raises OSError.
        """
        if self._memory is not None:
            return self._memory[offset : offset + nbytes]
        before = offset % mmap.PAGESIZE
        data = self._buffers.take(before + nbytes)[before : before + nbytes]
        if read_at(self._fd, offset, data) < nbytes:
            raise OSError(f"{self.path} is shorter than when it came")
        return data

    def register(self, registered: Registered, threads: ThreadPoolExecutor) -> None:
        """Begin to register the memory with a GPU."""
        if self._memory is not None and self._registering is None:
            self._registering = threads.submit(self._register, self._memory, registered)

    def _register(self, memory: memoryview, registered: Registered) -> None:
        try:
            for start in range(0, self.nbytes, WINDOW_BYTES):
                if self._is_closed:
                    return
                self._unregister.append(registered(memory[start : start + WINDOW_BYTES]))
        except OSError as error:
            logger.warning("the GPU reads uploads by way of other memory, which takes longer: %s", error)

    def is_registered(self, offset: int, nbytes: int) -> bool:
        """Return True if a GPU copies this range at PCIe speed."""
        return self._memory is not None and offset + nbytes <= len(self._unregister) * WINDOW_BYTES

    def copy_to(self, target: torch.Tensor, offset: int) -> None:
        """Queue a copy of registered memory from ``offset`` on to ``target``, uint8 on the GPU."""
        done = 0
        while done < target.nbytes:
            # one copy must not span two registrations
            count = min(WINDOW_BYTES - (offset + done) % WINDOW_BYTES, target.nbytes - done)
            source = torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=offset + done)
            target[done : done + count].copy_(source, non_blocking=True)
            done += count

    def rename(self, path: Path) -> None:
        """Rename the file. Raises OSError."""
        self.path.rename(path)
        self.path = path

    def close(self) -> None:
        """Unregister the memory, and close the file. It must not be read any more; its views stay valid."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed, self._memory = True, None
            os.close(self._fd)
        if self._registering is not None:
            self._registering.result()
        for unregister in self._unregister:
            unregister()


class StagingSpace:
    """The files of all uploads of one log. Thread-safe."""

    def __init__(self, kept: Path | None = None, registered: Registered | None = None) -> None:
        """
        Args:
            kept: path of the file between two uploads, in the same tmpfs as the log; None: the log is on a disk, so
                files are neither mapped nor kept.
            registered: registers memory with the GPU that quantizes, which then copies directly from it. Called for a
                file that is kept.
        """
        self._kept_at, self._registered = kept, registered
        self._kept: StagedFile | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="register-uploads")

    def open(self, path: Path, nbytes: int) -> StagedFile:
        """Return the file at ``path``. If there is none, it is the kept one, with its old bytes, or a new one.

        Raises OSError.
        """
        kept = self._take_kept() if nbytes else None
        if kept is not None and kept.nbytes == nbytes and not path.exists():
            try:
                kept.rename(path)
            except OSError:
                self._remove(kept)
                raise
            return kept
        if kept is not None:
            self._remove(kept)
        return StagedFile(path, nbytes, is_mapped=self._kept_at is not None)

    def release(self, file: StagedFile, *, keep: bool) -> None:
        """Keep the file for the next upload, or remove it. ``keep``: False if somebody still writes into it."""
        if not keep or self._kept_at is None or not file.nbytes:
            self._remove(file)
            return
        if (before := self._take_kept()) is not None:
            self._remove(before)
        try:
            file.rename(self._kept_at)
        except OSError as error:  # the upload itself is over: the next one takes a new file
            logger.info("%s is not kept for the next upload: %s", file.path, error)
            self._remove(file)
            return
        if self._registered is not None:
            file.register(self._registered, self._threads)
        with self._lock:
            self._kept = file

    def make_room(self, folder: Path, needed_bytes: int) -> None:
        """Remove the kept file if the file system of ``folder`` has less than ``needed_bytes`` free."""
        if shutil.disk_usage(folder).free < needed_bytes and (kept := self._take_kept()) is not None:
            self._remove(kept)

    def close(self) -> None:
        """Close the kept file, and stop registering."""
        if (kept := self._take_kept()) is not None:
            kept.close()
        self._threads.shutdown()

    def _take_kept(self) -> StagedFile | None:
        with self._lock:
            kept, self._kept = self._kept, None
            return kept

    @staticmethod
    def _remove(file: StagedFile) -> None:
        remove_tree(file.path)
        file.close()
