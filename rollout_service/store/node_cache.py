"""Copies of versions on a node whose replicas do not see the ingest's log.

All replicas of a node share one folder of copies, ``<root>/copies/<log>``, which is itself a log. A lock lets one
replica fetch while the others wait for its copy. A copy is read completely and checked against its digests before it is
added, so LATEST there only ever names a complete version. The ingest decides which version is the newest.

A replica holds a shared lock on the folder of each version that it serves or loads. The kernel releases it when the
process ends, so unused versions can be found without asking any process.
"""

import asyncio
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import ray
from ray.exceptions import RayError

from rollout_service.config.service import AUTO, WeightsConfig
from rollout_service.errors import LogCorrupt, LogLocked, NotFound, NotReady
from rollout_service.protocol.weight_log import Head, LogFile, Newest
from rollout_service.runtime.rpc import IngestCalls, until_answered
from rollout_service.runtime.threads import to_thread_and_back
from rollout_service.store.durable_io import (
    DISK_FULL,
    WriterLock,
    is_unlocked,
    lock_shared,
    make_private,
    no_room,
    remove_tree,
    require_own,
    sync_folder,
)
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import ManifestDamaged, read_manifest
from rollout_service.store.mapped_files import open_version_file

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
HELD_CHUNKS = 4
"""Maximum number of references that the ingest holds. Times ``CHUNK_BYTES``, this is what it pins in the object
store."""
HELD_S = 30.0
"""Time in seconds after which an unused reference is released."""
_KEPT = 2
"""Number of kept copies: the newest and the one before, which a starting replica may be reading."""
_LOCK_TURN_S = 1.0


_Key = tuple[int, str, int]


class ChunkServer:
    """Serves the files of the ingest's log through Ray's object store, in chunks. Lives in one event loop.

    While several nodes copy at once, a chunk is put into the store once. All nodes get the same reference, and Ray lets
    each pull the chunk from any node that has it. The ingest holds few references, and only for a short time; an object
    lives for as long as a node that received it is reading.
    """

    def __init__(self, log: WeightLog, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._log, self._chunk_bytes = log, chunk_bytes
        self._held: dict[_Key, asyncio.Task[ray.ObjectRef]] = {}
        self._putting = asyncio.Semaphore(2)

    def newest(self) -> Newest:
        """Return the newest version and the identity of its log. Raises NotReady before there is one."""
        origin, head = self._log.origin(), self._log.head()
        if origin is None or head is None:
            raise NotReady("version 0 is still being made from the model's folder")
        return Newest(origin=origin, root=self._log.root, head=head, control=self._log.control())

    def files(self, version: int) -> tuple[LogFile, ...]:
        """Return all files of a committed version. Raises NotFound."""
        try:
            # hidden files are temporary: KV scales while they are being written beside the manifest
            paths = sorted(path for path in self._folder(version).iterdir() if not path.name.startswith("."))
            return tuple(LogFile(name=path.name, nbytes=path.stat().st_size) for path in paths)
        except FileNotFoundError as error:
            raise NotFound(f"version {version} was removed while it was copied") from error

    async def chunk(self, version: int, file: str, index: int) -> list[ray.ObjectRef]:
        """Return a reference to a uint8 array: bytes ``[index, index + 1) * chunk_bytes`` of a file.

        The reference is in a list, since Ray would otherwise send the bytes. Raises NotFound, or LogCorrupt if the file
        cannot be read.
        """
        key = version, file, index
        task = self._held.pop(key, None)
        if task is None:
            if file not in {known.name for known in self.files(version)}:
                raise NotFound(f"version {version} has no file {file!r}", {"version": version, "file": file})
            task = asyncio.create_task(self._put(self._folder(version) / file, index))
            asyncio.get_running_loop().call_later(HELD_S, self._let_go, key, task)
        self._held[key] = task
        for oldest in list(self._held)[:-HELD_CHUNKS]:
            del self._held[oldest]
        try:
            return [await asyncio.shield(task)]
        except RayError:  # the object store may have room at the next attempt
            self._let_go(key, task)
            raise
        except OSError as error:
            self._let_go(key, task)
            if version not in self._log.versions():
                raise NotFound(f"version {version} was removed while it was copied") from error
            raise LogCorrupt(f"version {version}: {file} cannot be read: {error}") from error

    async def _put(self, path: Path, index: int) -> ray.ObjectRef:
        async with self._putting:
            return await asyncio.to_thread(self._read_and_put, path, index)

    def _read_and_put(self, path: Path, index: int) -> ray.ObjectRef:
        # not mapped: if a mapped file shrinks, the process is killed
        with open(open_version_file(path), "rb") as stream:
            return ray.put(np.fromfile(stream, np.uint8, self._chunk_bytes, offset=index * self._chunk_bytes))

    def _let_go(self, key: _Key, task: "asyncio.Task[ray.ObjectRef]") -> None:
        if self._held.get(key) is task:
            del self._held[key]

    def _folder(self, version: int) -> Path:
        if version not in self._log.versions():
            raise NotFound(
                f"version {version} is not in the log; it holds {self._log.versions()}",
                {"version": version, "versions": self._log.versions()},
            )
        return self._log.folder(version)


async def find_log(weights: WeightsConfig, ingest: IngestCalls) -> "tuple[WeightsConfig, NodeCache | None]":
    """Return the configuration with the log's folder as ``root``, and this node's copies of the log.

    The copies are None if the folder is the ingest's own log. Waits for the ingest. Raises ValueError as ``root_here``;
    LogCorrupt or OSError if the folder cannot be read.
    """
    before: Newest | None = None
    while True:
        newest = await until_answered(ingest.newest, weights.poll_s)
        root = newest.root if weights.root == AUTO else weights.root_here()
        found = weights.model_copy(update={"root": root})
        if WeightLog(root).origin() == newest.origin:
            return found, None
        if before is not None and before.origin == newest.origin:  # else the ingest may have just restarted
            return found, NodeCache(root, ingest, newest)
        before = newest


class NodeCache:
    """The versions that this node's replicas need, fetched through Ray's object store."""

    def __init__(self, root: Path, ingest: IngestCalls, newest: Newest, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._ingest, self._chunk_bytes = ingest, chunk_bytes
        self.newest = newest
        """The ingest's last answer."""
        self.log = WeightLog(root / "copies" / newest.origin.log)
        """The copies, as a log."""
        make_private(root)
        self.log.root.mkdir(parents=True, exist_ok=True)
        require_own(self.log.root)
        self._in_use: dict[int, int] = {}
        self._fd = lock_shared(self.log.root)
        for other in self.log.root.parent.iterdir():
            try:
                if other != self.log.root and is_unlocked(other):
                    shutil.rmtree(other, ignore_errors=True)  # of a log that is no more
            except OSError as error:  # another replica of the node may remove it, too
                logger.warning("%s is removed later, if it is still there: %s", other, error)

    async def look(self) -> None:
        """Ask the ingest for the newest version. Raises NotReady if it is away, LogCorrupt if its log is another."""
        newest = await self._ingest.newest()
        if newest.origin.log != self.newest.origin.log:
            raise LogCorrupt(
                f"the ingest writes another log now ({newest.origin.log}, newest version {newest.head.version}; it was "
                f"{self.newest.origin.log}, {self.newest.head.version}): bring it back to the node with its log, see "
                "weights.ingest_resources, or restart the service"
            )
        self.newest = newest

    async def fetch(self, head: Head) -> None:
        """Fetch a complete copy of a version, if it is not here, and hold it until ``release``.

        A copy with the same number and other content, as after the log was restored from a backup, is replaced. Raises
        NotReady if the ingest is away, NotFound if the version is gone there, LogCorrupt if the received bytes do not
        match its manifest, InsufficientStorage.
        """
        with await self._lock():
            if not await to_thread_and_back(self._has, head):
                self._let_go(head.version)
                await to_thread_and_back(self._remove, head.version)
                await self._copy(head)
            if head.version not in self._in_use:
                self._in_use[head.version] = lock_shared(self.log.folder(head.version))
            await to_thread_and_back(self._remove_old, max(head.version, self.newest.head.version))

    async def forget(self, version: int) -> None:
        """Remove a damaged copy."""
        with await self._lock():
            self._let_go(version)
            await to_thread_and_back(self._remove, version)

    def release(self, *, but: int) -> None:
        """Release all versions except ``but``: this process neither serves nor loads them."""
        for version in [known for known in self._in_use if known != but]:
            self._let_go(version)

    def _let_go(self, version: int) -> None:
        if version in self._in_use:
            os.close(self._in_use.pop(version))

    async def _lock(self) -> WriterLock:
        lock = WriterLock(self.log.root)
        while True:
            try:
                return await to_thread_and_back(lock.acquire, _LOCK_TURN_S)
            except LogLocked:
                continue
            except asyncio.CancelledError:
                lock.release()  # the lock may have been acquired meanwhile
                raise

    def _sound_versions(self) -> list[int]:
        """Return the versions that are here. Without LATEST, as after a crash, all are dropped and fetched again."""
        try:
            return self.log.versions()
        except LogCorrupt as error:
            logger.warning("all copies are dropped: %s", error)
            self.log.clear()
            return []

    def _has(self, head: Head) -> bool:
        """Return True if the copy of this number has the ingest's digest."""
        if head.version not in self._sound_versions():
            return False
        try:
            digest = read_manifest(self.log.folder(head.version)).digest
        except (OSError, ManifestDamaged) as error:
            logger.warning("fetching version %d anew: %s", head.version, error)
            return False
        if digest != head.digest:
            logger.warning(
                "version %d is %s in the ingest's log now, and was %s: fetching it anew",
                head.version, head.digest, digest,
            )  # fmt: skip
        return digest == head.digest

    def _remove(self, version: int) -> None:
        if version not in self._sound_versions():
            return
        try:
            self.log.withdraw(version)
        except ManifestDamaged as error:
            logger.warning("all copies are dropped: %s", error)
            self.log.clear()

    async def _copy(self, head: Head) -> None:
        # named by its digest: an interrupted copy is continued, and it may be of another log by now
        staged = self.log.staging(head.version).with_name(f"{head.version}-{head.digest}")
        for other in [path for path in staged.parent.glob("*") if path != staged]:
            await to_thread_and_back(remove_tree, other)
        files = await self._ingest.files(head.version)
        try:
            staged.mkdir(parents=True, exist_ok=True)
            for file in files:
                await self._copy_file(head.version, file, staged / file.name)
            await to_thread_and_back(self._take_in, head, staged)
        except OSError as error:
            if error.errno in DISK_FULL:
                needed_bytes = sum(file.nbytes for file in files)
                raise no_room(f"the copy of version {head.version}", self.log.root, needed_bytes) from error
            raise LogCorrupt(f"version {head.version} cannot be copied to {self.log.root}: {error}") from error

    async def _copy_file(self, version: int, file: LogFile, path: Path) -> None:
        """Copy a file, continuing after the whole chunks of an interrupted copy."""
        whole = min(path.stat().st_size if path.exists() else 0, file.nbytes) // self._chunk_bytes
        with path.open("ab") as stream:
            stream.truncate(whole * self._chunk_bytes)
            for index in range(whole, -(-file.nbytes // self._chunk_bytes)):
                (ref,) = await self._ingest.chunk(version, file.name, index)
                try:
                    chunk = await asyncio.to_thread(ray.get, ref)  # mapped from the object store, not copied
                except RayError as error:
                    raise NotReady(
                        f"a chunk of {file.name} of version {version} was lost with the ingest: {error}"
                    ) from error
                await to_thread_and_back(_append, stream.fileno(), chunk)
            await to_thread_and_back(os.fsync, stream.fileno())

    def _take_in(self, head: Head, staged: Path) -> None:
        try:
            manifest = read_manifest(staged)
            if (manifest.version, manifest.digest) != (head.version, head.digest):
                raise LogCorrupt(
                    f"what came as version {head.version} is version {manifest.version} with digest {manifest.digest}, "
                    f"not {head.digest}"
                )
            self.log.verify(manifest, folder=staged)
        except (LogCorrupt, ManifestDamaged, FileNotFoundError) as error:
            remove_tree(staged)
            raise LogCorrupt(f"fetched from the ingest: {error}") from error
        sync_folder(staged)
        self.log.adopt(head, staged)

    def _remove_old(self, newest: int) -> None:
        """Drop versions that no replica here holds and none will request, also newer ones if the log was set back."""
        versions = self.log.versions()
        for version in {*versions[:-_KEPT], *(v for v in versions if v > newest)}:
            if is_unlocked(self.log.folder(version)):
                self._remove(version)


def _append(fd: int, chunk: np.ndarray) -> None:
    rest = chunk.data
    while rest.nbytes:
        rest = rest[os.write(fd, rest) :]
