"""A second log on a disk, from which a crashed host recovers (``weights.durability: behind``).

Versions are committed and served in memory. Their numbers and digests are written to the disk first
(``ServedNumbers``), their bytes later. Each version is copied as a whole and checked against its digests. It exists on
the disk once its folder has been renamed, so this log only ever holds complete versions. It has the format of any log,
and ``rollout-service log`` can read it.

Which of the two logs counts when an ingest starts:

    versions in memory    only the process has ended: memory has everything that was served, and copying goes on.
                          Exception: the disk has a newer version, because it was rolled back meanwhile.
    none in memory        the host has crashed: the newest version on the disk is read into memory. Newer versions
                          were never reported as durable, and their numbers stay reserved for their digests.
    older ones in memory  the ingest ran on another machine meanwhile, with the same disk: as with none. The file
                          MEMORY of both logs has a name, by which the disk knows its last log in memory.
"""

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rollout_service.errors import LogCorrupt
from rollout_service.protocol.weight_log import Head
from rollout_service.runtime.threads import in_threads
from rollout_service.store.direct_io import BLOCK_BYTES, DirectFile, block_buffer
from rollout_service.store.durable_io import (
    DISK_FULL,
    WriterLock,
    make_private,
    no_room,
    remove_tree,
    replace_synced,
    sync_folder,
)
from rollout_service.store.log import WeightLog, uploads_folder
from rollout_service.store.manifest import Manifest, StoredTensor
from rollout_service.store.mapped_files import is_in_memory
from rollout_service.store.reading import VersionReader, pieces
from rollout_service.store.served_numbers import ServedNumbers

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Bytes that each thread reads, checks and writes at a time."""
_SMALL_FILES = ("ORIGIN", "CONTROL", "KV_CACHE", "FLEET", "LABELS", "kv_scales.json")
"""Small files of a log; see ``store/log.py``."""
_MEMORY = "MEMORY"
"""File in both roots with the name of a log in memory. The log has it from its creation, or from its restore."""


class CopyStopped(Exception):
    """Raised if the caller has cancelled a copy; the partial copy is removed."""


def log_to_go_on_with(root: Path, durable_root: Path | None) -> WeightLog:
    """Return the log with which a starting service continues: ``root``, or ``durable_root`` if ``root`` was lost in a
    crash."""
    lost = not (root / "LATEST").exists()
    return WeightLog(root if durable_root is None or not lost else durable_root)


def require_behind(root: Path, durable_root: Path) -> None:
    """Raise ValueError if copies in ``durable_root`` would not make versions in ``root`` safer. Both folders must
    exist."""
    if is_in_memory(durable_root):
        raise ValueError(
            f"weights.durable_root is {durable_root}, on a tmpfs, which is gone with the machine: name a folder on a "
            "disk"
        )
    if root.stat().st_dev == durable_root.stat().st_dev:
        raise ValueError(
            f"weights.root ({root}) and weights.durable_root ({durable_root}) are on one file system, so that each "
            f"version would be written twice for nothing: put weights.root into memory, below /dev/shm, or leave "
            f"durable_root out and set weights.durability: before_live, with weights.root: {durable_root}"
        )


class DurableLog:
    """The second log, written by one process. One thread at a time may change it; any thread may query it."""

    def __init__(self, root: Path, memory: WeightLog, keep: int) -> None:
        """``memory``: a log created with ``disk=root``. ``keep``: number of versions that stay on the disk."""
        self.log = WeightLog(root)
        self.served = ServedNumbers(self.log)
        self._memory, self._keep = memory, keep
        self._lock = WriterLock(root)
        self._versions: frozenset[int] = frozenset()

    @property
    def versions(self) -> frozenset[int]:
        """Return the versions on the disk, which survive a crash of the host."""
        return self._versions

    @property
    def newest(self) -> int | None:
        """Return the newest version on the disk; None if there is none."""
        return max(self._versions, default=None)

    def acquire(self, timeout_s: float) -> None:
        """Become the only writer. Raises LogLocked, OSError."""
        self._lock.acquire(timeout_s)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    # --- when an ingest starts

    def recover(self) -> None:
        """Make memory and disk consistent; see the module's docstring. Reads a whole version if memory has lost it.

        Raises LogCorrupt if they are two different logs, or the version to restore is damaged; InsufficientStorage if
        memory has no room for it; OSError.
        """
        self._remove_half_done()
        on_disk = self.log.head()
        in_memory = self._survived(on_disk)
        memory_counts = in_memory is not None and (on_disk is None or on_disk.version <= in_memory.version)
        roots = self._memory.root, self.log.root
        _copy_small_files(*(roots if memory_counts else roots[::-1]))
        if on_disk is not None and not memory_counts:
            self._restore(on_disk)
        self.served.load()
        if in_memory is None:
            self.served.all_lost()
        else:
            self._note_what_is_in_memory()
        self._name_memory(anew=in_memory is None)
        self._versions = frozenset(self.log.versions())

    def _remove_half_done(self) -> None:
        make_private(self.log.root)
        remove_tree(uploads_folder(self.log.root))
        if not (self.log.root / "LATEST").exists():
            # The first copy may have ended between its two renames. A number missing in SERVED may have been reported
            # as durable, and then LATEST is missing by damage.
            for number in self.log.served().digests:
                remove_tree(self.log.folder(number))
        self.log.remove_uncommitted()
        sync_folder(self.log.root)  # the previous process may not have reached its sync

    def _survived(self, on_disk: Head | None) -> Head | None:
        """Return the newest version in memory, if this memory was served last; otherwise remove its versions."""
        if on_disk is not None and not (self._memory.root / "LATEST").exists():
            remove_tree(self._memory.folder(on_disk.version))  # half restored
        in_memory = self._memory.head()
        self._require_one_log(on_disk, in_memory)
        known = _name_in(self.log.root)
        if in_memory is None or known is None or known == _name_in(self._memory.root):
            return in_memory
        logger.warning(
            "version %d and older ones in %s are removed: versions of this log were served on another machine since",
            in_memory.version, self._memory.root,
        )  # fmt: skip
        self._memory.clear()
        return None

    def _name_memory(self, anew: bool) -> None:
        name = _name_in(self._memory.root)
        if anew or name is None:
            name = uuid.uuid4().hex
            replace_synced(self._memory.root / _MEMORY, name)
        if name != _name_in(self.log.root):
            replace_synced(self.log.root / _MEMORY, name)

    def _require_one_log(self, on_disk: Head | None, in_memory: Head | None) -> None:
        mine, theirs = self._memory.origin(), self.log.origin()
        if in_memory is None or (on_disk is None and theirs is None):
            return
        both = f"weights.root ({self._memory.root}) and weights.durable_root ({self.log.root})"
        instead = "empty the one that is not meant, or name another folder"
        if mine is None or theirs is None or mine.log != theirs.log:
            raise LogCorrupt(
                f"{both} are two different logs, {mine and mine.log} with version {in_memory.version} and "
                f"{theirs and theirs.log} with {'none' if on_disk is None else on_disk.version}: {instead}"
            )
        common = set(self._memory.versions()) & set(self.log.versions())
        for version in sorted(common)[-1:]:
            digests = self._memory.manifest(version).digest, self.log.manifest(version).digest
            if digests[0] != digests[1]:
                raise LogCorrupt(
                    f"{both} hold version {version} with different digests, {digests[0]} and {digests[1]}, as after a "
                    f"backup was restored into one of them: {instead}",
                    {"version": version, "digests": digests},
                )

    def _restore(self, head: Head) -> None:
        manifest, staged = self.log.manifest(head.version), self._memory.staging(head.version)
        remove_tree(staged)
        try:
            copy_version(self.log.folder(head.version), manifest, staged, lambda: False)
        except OSError as error:
            remove_tree(staged)
            if error.errno in DISK_FULL:
                what = f"version {head.version}, which is read from {self.log.root},"
                raise no_room(what, self._memory.root, manifest.total_bytes) from error
            raise
        self._memory.adopt(head, staged)

    def _note_what_is_in_memory(self) -> None:
        memory, disk = self._memory.head(), self.log.head()
        newest, durable = -1 if memory is None else memory.version, -1 if disk is None else disk.version
        above = (version for version in self._memory.versions() if version > durable)
        self.served.in_memory({version: self._memory.manifest(version).digest for version in above}, newest)

    # --- while it runs

    def copy(self, version: int, stopped: Callable[[], bool] = lambda: False) -> None:
        """Copy a version from memory to the disk, durably, and drop old versions there.

        The version must not be dropped from memory meanwhile. ``stopped`` is polled. Raises CopyStopped, NotFound,
        LogCorrupt if it is damaged in memory, or OSError; the partial copy is removed then.
        """
        manifest, staged = self._memory.manifest(version), self.log.staging(version)
        remove_tree(staged)
        if version in self.log.versions():
            self.log.withdraw(version)  # a copy whose commit the disk did not confirm
        try:
            copy_version(self._memory.folder(version), manifest, staged, stopped)
            unconfirmed = self.log.adopt(self._head_of(manifest), staged)
            if unconfirmed is not None:
                raise unconfirmed
            # includes scales measured since the folder was read, and labels of dropped versions
            _copy_missing(self._memory.folder(version), self.log.folder(version))
            _copy_small_files(self._memory.root, self.log.root, ("LABELS",))
        except BaseException:
            remove_tree(staged)
            raise
        self._versions |= {version}
        head = self.log.head()
        self.served.forget_through(version if head is None else head.version)
        self._drop_old(version)

    def _head_of(self, manifest: Manifest) -> Head:
        head = self._memory.head()
        if head is not None and head.version == manifest.version:
            return head
        return Head(version=manifest.version, digest=manifest.digest, label=manifest.label)

    def _drop_old(self, copied: int) -> None:
        """Drop all but the newest versions and the one just copied, which a caller may wait for. Also drops unconfirmed
        ones."""
        head = self.log.head()
        self._versions = frozenset({*sorted(self._versions)[-self._keep :], copied})
        for version in self.log.versions():
            if version not in self._versions and version != (head and head.version):
                self.log.drop(version)


def copy_version(source: Path, manifest: Manifest, target: Path, stopped: Callable[[], bool]) -> None:
    """Copy a version, check each byte against its digest, and return once the copy is on disk.

    Avoids the page cache where the disk supports it: otherwise a commit that syncs a few bytes would wait for all of
    the copy.

    Raises CopyStopped, LogCorrupt with tensor, chunk and file, or OSError; the partial copy is not removed.
    """
    WeightLog(source.parent).verify_frame(manifest, folder=source)
    target.mkdir(parents=True)
    files, headers = manifest.files(), manifest.places.headers
    with VersionReader(source, manifest) as reader:
        each = in_threads(
            lambda file: _copy_file(reader, headers[file].text, files[file], target / file, stopped), list(files)
        )
        for _ in each:
            pass
    _copy_missing(source, target)
    sync_folder(target)


def _copy_file(
    reader: VersionReader, header: bytes, tensors: Sequence[StoredTensor], path: Path, stopped: Callable[[], bool]
) -> None:
    found = list(pieces(((tensor, chunk) for tensor in tensors for chunk in tensor.chunks()), PIECE_BYTES))
    buffer = block_buffer(max([len(header), *(piece.nbytes for piece in found)]) + BLOCK_BYTES)
    buffer[: len(header)] = header
    written, held = 0, len(header)
    with DirectFile.create(path) as file:
        for piece in found:  # pieces are contiguous, and the first one follows the header
            if stopped():
                raise CopyStopped
            rest = held % BLOCK_BYTES
            file.write(buffer, held - rest, written)
            written += held - rest
            buffer[:rest] = bytes(buffer[held - rest : held])
            reader.read(piece, buffer[rest:])
            held = rest + piece.nbytes
        file.write(buffer, held, written)
        file.sync()


def _name_in(root: Path) -> str | None:
    try:
        return (root / _MEMORY).read_text()
    except FileNotFoundError:
        return None


def _copy_missing(source: Path, target: Path) -> None:
    """Copy the files of a version other than its tensors, if missing."""
    for path in sorted(source.iterdir()):
        # hidden files are temporary
        copy = target / path.name
        if not path.name.startswith(".") and path.suffix != ".safetensors" and not copy.exists():
            replace_synced(copy, path.read_text())
            os.utime(copy, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))  # the time of the commit


def _copy_small_files(source: Path, target: Path, names: Iterable[str] = _SMALL_FILES) -> None:
    """Copy the existing small files of a log."""
    for name in names:
        if (source / name).exists():
            replace_synced(target / name, (source / name).read_text())
