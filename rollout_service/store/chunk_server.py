"""Serve files of committed versions through Ray's object store, in chunks; the ingest's side of distribution.

While several nodes copy at once, a chunk is put into the store once. All nodes get the same reference, and Ray lets
each pull the chunk from any node that has it. The ingest holds few references, and only for a short time; an object
lives for as long as a node that received it is reading.
"""

import asyncio
from pathlib import Path

import numpy as np
import ray

from rollout_service.errors import LogCorrupt, NotFound, NotReady
from rollout_service.protocol.weight_log import LogFile, Newest
from rollout_service.store.log import WeightLog
from rollout_service.store.mapped_files import open_version_file

CHUNK_BYTES = 64 << 20
HELD_CHUNKS = 4
"""Maximum number of references that the ingest holds. Times ``CHUNK_BYTES``, this is what it pins in the object
store."""
HELD_S = 30.0
"""Time in seconds after which an unused reference is released."""

_Key = tuple[int, str, int]


class ChunkServer:
    """Serves the files of one log. Lives in one event loop."""

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
        # hidden files are temporary: KV scales while they are being written beside the manifest
        paths = sorted(path for path in self._folder(version).iterdir() if not path.name.startswith("."))
        return tuple(LogFile(name=path.name, nbytes=path.stat().st_size) for path in paths)

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
