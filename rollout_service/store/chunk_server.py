"""The ingest's side of distribution: files of committed versions, handed out through Ray's object store.

A file is handed out in chunks. A chunk is put once while several nodes copy side by side: all get the same reference,
and Ray lets each of them pull it from any node that has it. The ingest holds few references, and none for long; an
object lives on for as long as a node that was given it is reading.
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
"""References that the ingest holds at most: this times ``CHUNK_BYTES`` is what it pins of the object store."""
HELD_S = 30.0
"""How long it holds one that nobody asks for."""

_Key = tuple[int, str, int]


class ChunkServer:
    """Hands out the files of one log. Lives in one event loop."""

    def __init__(self, log: WeightLog, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._log, self._chunk_bytes = log, chunk_bytes
        self._held: dict[_Key, asyncio.Task[ray.ObjectRef]] = {}
        self._putting = asyncio.Semaphore(2)

    def newest(self) -> Newest:
        """The newest version, and which log it is in. Raises NotReady before there is one."""
        origin, head = self._log.origin(), self._log.head()
        if origin is None or head is None:
            raise NotReady("version 0 is still being made from the model's folder")
        return Newest(origin=origin, root=self._log.root, head=head, control=self._log.control())

    def files(self, version: int) -> tuple[LogFile, ...]:
        """All files of a committed version. Raises NotFound."""
        # hidden: what is being written beside the manifest (KV scales), under this name for milliseconds
        paths = sorted(path for path in self._folder(version).iterdir() if not path.name.startswith("."))
        return tuple(LogFile(name=path.name, nbytes=path.stat().st_size) for path in paths)

    async def chunk(self, version: int, file: str, index: int) -> list[ray.ObjectRef]:
        """One reference to a uint8 array: bytes ``[index, index + 1) * chunk_bytes`` of a file.

        In a list, or Ray would send the bytes instead. Raises NotFound, or LogCorrupt if the file cannot be read.
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
        # not mapped: a file that shrinks under a map kills the process
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
