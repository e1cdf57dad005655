"""A log on a disk behind a log in memory (``weights.durability: behind``): what a host that has crashed begins with.

Versions are committed and served in memory. Their numbers and digests are on the disk before that (``ServedNumbers``),
their bytes come behind: each is copied as a whole, checked against its digests on the way, and exists there once its
folder has been renamed, so that this log only ever holds whole versions. It is a log like any other, and
``rollout-service log`` reads it.

Which of two logs counts when an ingest starts:

    versions in memory    the process has ended, the host has not: memory has all that was served, and the copying
                          goes on. Unless the disk has a newer one: somebody has rolled back there meanwhile.
    none                  the host has crashed: the newest version on the disk is read into memory. Newer ones were
                          never said to be durable, and their numbers stand for the digests that they had.
    older ones            the ingest was on another machine meanwhile, with the same disk: likewise. The disk knows by a
                          name, in the file MEMORY of both, which log in memory it was behind last.
"""

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rollout_service.errors import LogCorrupt
from rollout_service.protocol.weight_log import Head
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
from rollout_service.threads import in_threads

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Read, checked and written at a time, by each thread."""
_SMALL_FILES = ("ORIGIN", "CONTROL", "KV_CACHE", "FLEET", "LABELS", "kv_scales.json")
"""Of a log; see ``store/log.py``."""
_MEMORY = "MEMORY"
"""In both roots: a name that a log in memory has from its beginning, or from when it was read from the disk."""


class CopyStopped(Exception):
    """Whoever asked for a copy wants it no more; nothing of it is left."""


def log_to_go_on_with(root: Path, durable_root: Path | None) -> WeightLog:
    """Of a service that starts: what is in ``root``, or else what a crash of the host has left of it."""
    lost = not (root / "LATEST").exists()
    return WeightLog(root if durable_root is None or not lost else durable_root)


def require_behind(root: Path, durable_root: Path) -> None:
    """Raise ValueError unless versions in the first folder gain anything from copies in the second. Both must exist."""
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
    """The log behind. Written by one process, of which one thread at a time may change it; any may ask."""

    def __init__(self, root: Path, memory: WeightLog, keep: int) -> None:
        """``memory``: made with ``disk=root``. ``keep``: how many versions stay on the disk."""
        self.log = WeightLog(root)
        self.served = ServedNumbers(self.log)
        self._memory, self._keep = memory, keep
        self._lock = WriterLock(root)
        self._versions: frozenset[int] = frozenset()

    @property
    def versions(self) -> frozenset[int]:
        """What is on the disk, whatever happens to the host."""
        return self._versions

    @property
    def newest(self) -> int | None:
        """The newest of them."""
        return max(self._versions, default=None)

    def acquire(self, timeout_s: float) -> None:
        """Become the only writer. Raises LogLocked, OSError."""
        self._lock.acquire(timeout_s)

    def release(self) -> None:
        """Let the next writer in."""
        self._lock.release()

    # --- when an ingest starts

    def recover(self) -> None:
        """Have memory and disk say the same; see the module. Reads a whole version if memory has lost it.

        Raises LogCorrupt if they are two different logs, or what is to be read is damaged; InsufficientStorage if the
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
            # the very first copy may have ended between its two renames; a number that is not in SERVED may have been
            # said to be durable, and then it is LATEST that is missing
            for number in self.log.served().digests:
                remove_tree(self.log.folder(number))
        self.log.remove_uncommitted()
        sync_folder(self.log.root)  # the process before may not have come to that

    def _survived(self, on_disk: Head | None) -> Head | None:
        """The newest version in memory, if what is there was served last; removes it otherwise."""
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
        """Have a version of the log in memory on the disk, durably, and drop what is too old there.

        Nobody may drop it from memory meanwhile. ``stopped`` is asked now and then. Raises CopyStopped, NotFound,
        LogCorrupt if it is damaged in memory, or OSError; what was written is removed then.
        """
        manifest, staged = self._memory.manifest(version), self.log.staging(version)
        remove_tree(staged)
        if version in self.log.versions():
            self.log.withdraw(version)  # the disk did not confirm it
        try:
            copy_version(self._memory.folder(version), manifest, staged, stopped)
            unconfirmed = self.log.adopt(self._head_of(manifest), staged)
            if unconfirmed is not None:
                raise unconfirmed
            # scales that were measured since their folder was read, and labels of versions that are dropped by now
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
        """All but the newest, what the disk did not confirm, and what was copied now: somebody has waited for that."""
        head = self.log.head()
        self._versions = frozenset({*sorted(self._versions)[-self._keep :], copied})
        for version in self.log.versions():
            if version not in self._versions and version != (head and head.version):
                self.log.drop(version)


def copy_version(source: Path, manifest: Manifest, target: Path, stopped: Callable[[], bool]) -> None:
    """Copy a version's folder, each byte held against its digest on the way, and return once the copy is on disk.

    Around the page cache where the disk can: a commit that syncs a few bytes would wait for all that lies in it.

    Raises CopyStopped, LogCorrupt that names tensor, chunk and file, or OSError; what was written is there still.
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
        for piece in found:  # they follow one another, and the header
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
    """The files beside the tensors of a version."""
    for path in sorted(source.iterdir()):
        # hidden: what is being written under another name
        copy = target / path.name
        if not path.name.startswith(".") and path.suffix != ".safetensors" and not copy.exists():
            replace_synced(copy, path.read_text())
            os.utime(copy, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))  # says when it was committed


def _copy_small_files(source: Path, target: Path, names: Iterable[str] = _SMALL_FILES) -> None:
    """Those of a log that are there."""
    for name in names:
        if (source / name).exists():
            replace_synced(target / name, (source / name).read_text())
