"""Write a version's tensors, in any order, into safetensors files with a fixed layout.

The safetensors library writes a file at once from tensors that are all in memory. A version arrives tensor by tensor
and may be larger than memory. Its names, dtypes and shapes are known from the start, and therefore its layout.

On a disk a tensor's bytes are written and synced. In a log in memory they are written in place (``slot``), in reused
files of an earlier version if there are any: ``LogMemory``.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rollout_service.runtime.threads import in_threads
from rollout_service.store.layout import LaidOutFile, Layout, TensorPlace, neighbours
from rollout_service.store.manifest import CHUNK_BYTES, DIGEST_BYTES, StoredTensor, joined_digests, tensor_digests
from rollout_service.store.mapped_files import MappedFiles, Registered, SpareFiles, is_in_memory
from rollout_service.store.reading import read_at
from rollout_service.store.upload_progress import UploadProgress

_SYNC_BYTES = 128 << 20


class LogMemory(NamedTuple):
    """Mapped and spare files of a log in memory, for its writer."""

    mapped: MappedFiles
    spare: SpareFiles

    @classmethod
    def of(cls, root: Path, registered: Registered | None) -> "LogMemory | None":
        """Return the memory of a log; None if it is on a disk. ``registered``: see ``MappedFiles``. Raises OSError."""
        spare = SpareFiles(root)
        if not is_in_memory(root):
            spare.remove()  # left over in a log that was copied from a tmpfs
            return None
        spare.begin()
        return cls(MappedFiles(registered), spare)


class VersionWriter:
    """Lays tensors out in files below ``folder`` and fills them. Thread-safe for different tensors."""

    def __init__(self, folder: Path, layout: Layout, memory: LogMemory | None = None) -> None:
        """``memory``: of a log in memory; None: the folder is on a disk. Raises OSError if there is no room."""
        self._folder, self._memory = folder, memory
        self._mapped: dict[str, memoryview] = {}
        self._place = layout.places
        self._written: dict[str, StoredTensor] = {}
        self._fds: dict[str, int] = {}
        self._syncer = ThreadPoolExecutor(1, "sync")
        self._syncing: Future[None] | None = None
        self._unsynced_bytes = 0
        self._lock = threading.Lock()
        self._progress: UploadProgress | None = None
        try:
            files = [(self._open_file(file), file.nbytes) for file in layout.files]
            if memory is not None:
                memory.spare.keep_only({file.nbytes for file in layout.files})  # others have another layout
            # reports a full disk before the upload begins; a tmpfs allocates and zeroes its memory here
            new = [file for file in files if memory is None or not _has_all_pages(*file)]
            list(in_threads(lambda file: os.posix_fallocate(file[0], 0, file[1]), new))
            if memory is not None:
                self._mapped = {file: memory.mapped.of(fd) for file, fd in self._fds.items()}
                self._progress = UploadProgress(folder, layout.digest, layout.numbers)
        except OSError:
            self.close()
            raise

    def write(self, name: str, data: memoryview) -> None:
        """Store the bytes of one tensor. Raises KeyError for a name without a slot, ValueError for a wrong size."""
        place = self._place[name]
        if data.nbytes != place.nbytes:
            raise ValueError(f"{name} has {data.nbytes} bytes, its slot {place.nbytes}")
        write_at(self._fds[place.file], data, place.offset)
        self._sync_early(place.file, data.nbytes)
        self._note(name, *tensor_digests(data))

    @property
    def has_slots(self) -> bool:
        """Return True if the files are in memory, and are written through ``slot``."""
        return bool(self._mapped)

    @property
    def are_slots_registered(self) -> bool:
        """Return True if a GPU reads and writes the files at PCIe speed."""
        return self._memory is not None and self._memory.mapped.are_registered

    def slot(self, name: str) -> memoryview:
        """Return the memory of a tensor's slot, uint8 [nbytes], to be filled before ``filled``. Raises KeyError."""
        place = self._place[name]
        return self._mapped[place.file][place.offset : place.offset + place.nbytes]

    def stretch(self, file: str, start: int, nbytes: int) -> memoryview:
        """Return a range of a file, uint8 [nbytes]: the slots of adjacent tensors. Raises KeyError."""
        return self._mapped[file][start : start + nbytes]

    def contiguous_slots(self, places: Iterable[TensorPlace]) -> Iterator[tuple[int, memoryview]]:
        """Yield the slots of these tensors. Adjacent slots of a file are joined, and yielded with their number."""
        for count, file, start, end in neighbours(places):
            yield count, self._mapped[file][start:end]

    def filled(self, name: str) -> None:
        """Hash a tensor whose bytes are in its slot, and note it as stored. Raises KeyError."""
        self._note(name, *tensor_digests(self.slot(name)))

    def filled_and_hashed(self, places: Iterable[TensorPlace], digests: bytes) -> None:
        """Note that the bytes of these tensors are in their slots.

        ``digests``: xxh3-128 of each chunk of each tensor, concatenated. Raises ValueError for a wrong number of
        digests.
        """
        start = 0
        for name, _, _, _, _, nbytes in places:
            end = start + DIGEST_BYTES * -(-nbytes // CHUNK_BYTES)
            self._note(name, *joined_digests(digests[start:end]))
            start = end
        if start != len(digests):
            raise ValueError(f"{len(digests)} bytes of digests for chunks that have {start}")

    def _note(self, name: str, digest: str, chunk_digests: bytes) -> None:
        self._written[name] = StoredTensor(*self._place[name], digest, chunk_digests)
        if self._progress is not None:
            self._progress.stored(name)

    def _sync_early(self, file: str, nbytes: int) -> None:
        """Sync early, so that the disk works during the upload and the commit does not wait for all of it."""
        with self._lock:
            self._unsynced_bytes += nbytes
            if self._unsynced_bytes < _SYNC_BYTES or (self._syncing is not None and not self._syncing.done()):
                return
            self._require_synced()
            self._unsynced_bytes = 0
            self._syncing = self._syncer.submit(os.fdatasync, self._fds[file])

    def _require_synced(self) -> None:
        # Linux reports a failed page write only once: a later sync of the same file would succeed
        if self._syncing is not None:
            self._syncing.result()

    @property
    def unwritten(self) -> list[str]:
        """Return the slots that are not written yet."""
        return [name for name in self._place if name not in self._written]

    def place(self, name: str) -> TensorPlace:
        """Return the place of a tensor, with its dtype and shape. Raises KeyError."""
        return self._place[name]

    def read(self, name: str) -> bytearray:
        """Return the bytes of a stored tensor. Raises KeyError for one that is not stored, or OSError."""
        tensor = self._written[name]
        data = bytearray(tensor.nbytes)
        if read_at(self._fds[tensor.file], tensor.offset, memoryview(data)) < tensor.nbytes:
            raise OSError(f"{self._folder / tensor.file} is shorter than what was written into it")
        return data

    def finish(self) -> tuple[StoredTensor, ...]:
        """Sync the files to disk and return the stored tensors.

        Raises ValueError while slots are unwritten, OSError for a failed write.
        """
        if unwritten := self.unwritten:
            raise ValueError(f"{len(unwritten)} tensors were never written: {unwritten[:5]}")
        self._require_synced()
        for fd in self._fds.values():
            os.fsync(fd)
        self.close()
        return tuple(self._written[name] for name in self._place)

    def close(self) -> None:
        """Close the files; their content stays."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        self._syncer.shutdown()
        for fd in self._fds.values():
            os.close(fd)
        self._fds, self._mapped = {}, {}

    def _open_file(self, file: LaidOutFile) -> int:
        """Open a file, write its header, and return its descriptor."""
        path = self._folder / file.name
        is_spare = self._memory is not None and self._memory.spare.take(file.nbytes, path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | (0 if is_spare else os.O_TRUNC), 0o600)
        self._fds[file.name] = fd
        write_at(fd, memoryview(file.header), 0)
        return fd


def _has_all_pages(fd: int, nbytes: int) -> bool:
    """Return True if a file in memory already has a page for each of its bytes, as spare files have.

    Allocating them again takes time, since Linux visits every page, but no space.
    """
    stat = os.fstat(fd)
    return stat.st_size >= nbytes and stat.st_blocks * 512 >= nbytes


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` to a file. Raises OSError."""
    data = data.cast("B")
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
