"""Storage for the parts of uploads: files, which outlive the process, and memory from which tensors are read.

On a disk, a part is received into a buffer of limited total size, and written to its file. In memory (a
tmpfs), its file is mapped and received into directly, without a copy. Linux allocates new pages of a tmpfs at 2.4 GB/s
with any number of threads (2 H200, 32 cores, November 2026), a fraction of the sockets' speed. Files of a finished
upload are therefore kept, mapped, for the next one.
"""

import io
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from rollout_service.store.buffers import BufferPool
from rollout_service.store.durable_io import remove_tree
from rollout_service.store.mapped_files import Registered

logger = logging.getLogger(__name__)

FEWEST_BUFFER_BYTES, MOST_BUFFER_BYTES = 192 << 20, 1 << 30
_BUFFERED_PARTS = 12
"""Number of parts with a buffer: those being received and those waiting for conversion. With fewer, parts are read
again from the disk."""
_MOST_MAPPED = 16_384
"""Maximum number of mapped files: by default, Linux allows a process 65 530 mappings."""


@dataclass(frozen=True)
class Incoming:
    """Target of a part that is being received."""

    memory: memoryview | None
    """Memory for the whole part; None: no memory is free, and it is only in ``file``."""
    file: io.FileIO | None
    """File to be written piece by piece; None: ``memory`` is the mapped file."""

    def write(self, data: memoryview) -> None:
        """Append to the file, if there is one. Raises OSError."""
        while self.file is not None and data.nbytes:
            data = data[self.file.write(data) :]


class PartSpace(Protocol):
    """Storage for parts. Its methods are thread-safe and raise OSError."""

    def receive(self, path: Path, nbytes: int) -> "Incoming":
        """Return a target for a part of ``nbytes`` at ``path``, which must not exist yet."""
        ...

    def release(self, path: Path) -> None:
        """Release the file at ``path``, if it exists, and the memory of its part, which must no longer be read."""
        ...

    def release_all(self, folder: Path, keep_bytes: int) -> None:
        """Release all parts in ``folder``. Keeps at most ``keep_bytes`` in all for the next uploads."""
        ...

    def make_room(self, folder: Path, needed_bytes: int) -> None:
        """Free kept files if the file system of ``folder`` has less than ``needed_bytes`` without."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Size in bytes of the files kept for the next uploads."""
        ...


class DiskSpace:
    """Parts on a disk."""

    kept_bytes = 0

    def __init__(self, buffer_bytes: int) -> None:
        """``buffer_bytes``: memory for parts, in addition to their files."""
        self._buffers = BufferPool(buffer_bytes)

    @classmethod
    def for_parts_of(cls, part_bytes: int) -> "DiskSpace":
        """Return a space with memory for a dozen parts of that size."""
        return cls(min(max(FEWEST_BUFFER_BYTES, _BUFFERED_PARTS * part_bytes), MOST_BUFFER_BYTES))

    def receive(self, path: Path, nbytes: int) -> Incoming:
        """See ``PartSpace``. The caller closes the file."""
        return Incoming(self._buffers.take(nbytes), io.FileIO(path, "w"))

    def release(self, path: Path) -> None:
        """See ``PartSpace``."""
        path.unlink(missing_ok=True)

    def release_all(self, folder: Path, keep_bytes: int) -> None:
        """See ``PartSpace``."""
        remove_tree(folder)
        self._buffers.trim()

    def make_room(self, folder: Path, needed_bytes: int) -> None:
        """See ``PartSpace``."""


@dataclass
class _Mapped:
    nbytes: int
    memory: torch.Tensor
    """uint8 [nbytes], the file's own pages."""
    unregister: Callable[[], None] | None = None

    def drop(self) -> None:
        """Unregister the memory of a removed file; it is freed with its last view."""
        if self.unregister is not None:
            self.unregister()


class MappedSpace:
    """Parts in a tmpfs.

    A reused file keeps its old bytes until the new part is received. Its name marks it as incomplete
    (``UploadSession.incoming_path``), so it is not taken for a part after a crash.
    """

    def __init__(self, kept: Path, registered: Registered | None = None) -> None:
        """
        Args:
            kept: a separate folder in the same file system, for files between two uploads.
            registered: registers memory with the GPU that quantizes, which then copies directly from it. Called when a
                file is used for the second time.
        """
        self._folder, self._registered = kept, registered
        self._lock = threading.Lock()
        self._used: dict[int, _Mapped] = {}
        """Mapped files by inode, which stays the same when a file is renamed."""
        self._free: list[tuple[Path, _Mapped]] = []

    @property
    def kept_bytes(self) -> int:
        """See ``PartSpace``."""
        with self._lock:
            return sum(mapped.nbytes for _, mapped in self._free)

    def receive(self, path: Path, nbytes: int) -> Incoming:
        """See ``PartSpace``. A reused file still has the bytes of an earlier part."""
        with self._lock:
            place = next((i for i, (_, mapped) in enumerate(self._free) if mapped.nbytes == nbytes), None)
            again = None if place is None else self._free.pop(place)
            many = len(self._used) >= _MOST_MAPPED
        if again is None and many:
            return Incoming(None, io.FileIO(path, "w"))
        mapped = _new(path, nbytes) if again is None else self._renamed(again, path)
        if again is not None and mapped.unregister is None:
            self._register(mapped)
        with self._lock:
            self._used[path.stat().st_ino] = mapped
        return Incoming(mapped.memory.numpy().data, None)

    def release(self, path: Path) -> None:
        """See ``PartSpace``."""
        with self._lock:
            self._keep(path)

    def release_all(self, folder: Path, keep_bytes: int) -> None:
        """See ``PartSpace``."""
        with self._lock:
            for path in sorted(folder.glob("part-*")):
                if path.name.endswith(".incoming"):  # a sender is still writing: the file is freed when that ends
                    if (dropped := self._used.pop(path.stat().st_ino, None)) is not None:
                        dropped.drop()
                else:
                    self._keep(path)
            self._trim(keep_bytes)
        remove_tree(folder)

    def make_room(self, folder: Path, needed_bytes: int) -> None:
        """See ``PartSpace``."""
        with self._lock:
            if shutil.disk_usage(folder).free < needed_bytes - sum(mapped.nbytes for _, mapped in self._free):
                self._trim(0)

    def _keep(self, path: Path) -> None:
        try:
            mapped = self._used.pop(path.stat().st_ino, None)
        except FileNotFoundError:
            return
        if mapped is None:
            path.unlink()
            return
        self._folder.mkdir(exist_ok=True)
        kept = self._folder / uuid.uuid4().hex
        path.rename(kept)
        self._free.append((kept, mapped))

    def _trim(self, keep_bytes: int) -> None:
        left = sum(mapped.nbytes for _, mapped in self._free)
        while left > keep_bytes:
            path, mapped = self._free.pop(0)
            path.unlink(missing_ok=True)
            mapped.drop()
            left -= mapped.nbytes
        if not self._free:
            remove_tree(self._folder)

    def _renamed(self, again: tuple[Path, _Mapped], path: Path) -> _Mapped:
        kept, mapped = again
        try:
            kept.rename(path)
        except OSError:
            kept.unlink(missing_ok=True)
            mapped.drop()
            raise
        return mapped

    def _register(self, mapped: _Mapped) -> None:
        if self._registered is None:
            return
        try:
            mapped.unregister = self._registered(mapped.memory.numpy().data)
        except OSError as error:
            self._registered = None
            logger.warning("the GPU reads parts by way of other memory, which takes longer: %s", error)


@contextmanager
def received(space: PartSpace, path: Path, nbytes: int) -> Iterator[Incoming]:
    """Yield a target for a part at ``path``. At the end the path is released, so move a valid part away before."""
    incoming = None
    try:
        incoming = space.receive(path, nbytes)
        if incoming.file is None:
            yield incoming
        else:
            with incoming.file:
                yield incoming
    finally:
        space.release(path)


def _new(path: Path, nbytes: int) -> _Mapped:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # if there is no space this raises an error, while a later write would kill the process with a signal
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)
    # not Python's mmap, which keeps a file descriptor for each
    memory = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
    return _Mapped(nbytes, memory)
