"""Where the parts of uploads lie: files, because they outlive the process, and memory that their tensors are read from.

On a disk a part is received into memory, of which there is only so much, and written around the page cache. In memory
(a tmpfs) its file is mapped, and received into as it is: there is no copy. New pages of a tmpfs come at 2.4 GB/s
whatever the number of threads (2 H200, 32 cores, November 2026), a fraction of what the sockets bring. So the files of
an upload that has ended are kept, mapped, for the next one.
"""

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

from rollout_service.store.direct_io import BufferPool, DirectFile
from rollout_service.store.durable_io import remove_tree
from rollout_service.store.mapped_files import Registered

logger = logging.getLogger(__name__)

FEWEST_BUFFER_BYTES, MOST_BUFFER_BYTES = 192 << 20, 1 << 30
_BUFFERED_PARTS = 12
"""Those under way and those that wait to be converted: with fewer, parts are read again from the disk."""
_MOST_MAPPED = 16_384
"""Linux gives a process 65 530 mappings unless it is told otherwise."""


@dataclass(frozen=True)
class Incoming:
    """Where a part is received."""

    memory: memoryview | None
    """All of it; None: there is no room in memory, and it lies in ``file`` alone."""
    file: DirectFile | None
    """To be written piece by piece; None: ``memory`` is that of the file."""


class PartSpace(Protocol):
    """Its methods may be called from any thread, and raise OSError."""

    def receive(self, path: Path, nbytes: int) -> "Incoming":
        """Room for a part of ``nbytes`` at ``path``, which must not exist yet."""
        ...

    def release(self, path: Path) -> None:
        """Nobody needs what lies at ``path``, if anything does, nor reads the memory it was received into."""
        ...

    def release_all(self, folder: Path, keep_bytes: int) -> None:
        """Nobody needs the parts in ``folder``. Keeps at most ``keep_bytes`` in all for the next uploads."""
        ...

    def make_room(self, folder: Path, needed_bytes: int) -> None:
        """Give up what is kept if the file system of ``folder`` has not ``needed_bytes`` without."""
        ...

    @property
    def kept_bytes(self) -> int:
        """What is kept for the next uploads."""
        ...


class DirectSpace:
    """Parts on a disk."""

    kept_bytes = 0

    def __init__(self, buffer_bytes: int) -> None:
        """``buffer_bytes``: of memory for parts beside their files."""
        self._buffers = BufferPool(buffer_bytes)

    @classmethod
    def for_parts_of(cls, part_bytes: int) -> "DirectSpace":
        """With memory for a dozen parts of that size."""
        return cls(min(max(FEWEST_BUFFER_BYTES, _BUFFERED_PARTS * part_bytes), MOST_BUFFER_BYTES))

    def receive(self, path: Path, nbytes: int) -> Incoming:
        """See ``PartSpace``. Whoever gets it closes the file."""
        return Incoming(self._buffers.take(nbytes), DirectFile.create(path))

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
        """The file is removed; its memory ends with its last view."""
        if self.unregister is not None:
            self.unregister()


class MappedSpace:
    """Parts in a tmpfs.

    A file that is used again keeps its old bytes until it is received into, under a name that says that it is not
    whole (``UploadSession.incoming_path``): whoever finds it after a crash does not take it for a part.
    """

    def __init__(self, kept: Path, registered: Registered | None = None) -> None:
        """
        Args:
            kept: a folder of its own in the same file system, for files between two uploads.
            registered: makes memory known to the GPU that tensors are quantized on, which then copies them from there;
                called when a file is used for the second time.
        """
        self._folder, self._registered = kept, registered
        self._lock = threading.Lock()
        self._used: dict[int, _Mapped] = {}
        """By inode: a file keeps it under whatever name."""
        self._free: list[tuple[Path, _Mapped]] = []

    @property
    def kept_bytes(self) -> int:
        """See ``PartSpace``."""
        with self._lock:
            return sum(mapped.nbytes for _, mapped in self._free)

    def receive(self, path: Path, nbytes: int) -> Incoming:
        """See ``PartSpace``. What is there is of an earlier part."""
        with self._lock:
            place = next((i for i, (_, mapped) in enumerate(self._free) if mapped.nbytes == nbytes), None)
            again = None if place is None else self._free.pop(place)
            many = len(self._used) >= _MOST_MAPPED
        if again is None and many:
            return Incoming(None, DirectFile.create(path))
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
                if path.name.endswith(".incoming"):  # somebody is writing there still: it is gone when that one ends
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
    """Room for a part at ``path``, from where it is taken if it is sound: what is there in the end is released."""
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
        os.posix_fallocate(fd, 0, nbytes)  # what has no room is an error here, and no signal when it is written to
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)
    # not Python's own mmap, which keeps a descriptor for each
    memory = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
    return _Mapped(nbytes, memory)
