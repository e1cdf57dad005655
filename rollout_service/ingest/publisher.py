"""Publishes the log's versions in a store, for services on other clusters that follow it by ``weights.watch``.

The versions have the format of ``sources/delta_folder.py``, with tensors as they are stored, so that the followers'
versions have the same digests. Most hold the changes to the version that was published before.
"""

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import xxhash
import zstandard

from rollout_service.errors import LogCorrupt, RolloutServiceError, VersionConflict
from rollout_service.ingest.stores import all_numbers, folder_name, open_store, published_numbers
from rollout_service.model.weight_files import INDEX_FILE
from rollout_service.runtime.tasks import RepeatedTask
from rollout_service.runtime.threads import in_threads
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, StoredTensor
from rollout_service.store.reading import VersionReader, pieces

MAX_LINKS = 16
"""Maximum number of deltas between two whole versions. A new follower reads that many."""
_MAX_SHARE = 0.25
"""Maximum size of a delta, as a share of the version's: it is built in memory, and a whole version is not."""


class _Change(NamedTuple):
    frame: bytes
    checksum: str


class Publisher(RepeatedTask):
    """Writes each newest version of a log to a store. Skips versions that are replaced while it writes."""

    def __init__(self, log: WeightLog, store: str, retry_s: float) -> None:
        """``store``: a folder or URL of this log alone. ``retry_s``: the wait after a failure, at first."""
        super().__init__(f"weights.publish={store}", self._publish_next, retry_s)
        self._log, self._store = log, store
        self._base: Manifest | None = None
        self._links = 0
        self._wholes: list[int] = []
        self._committed = asyncio.Event()
        self._committed.set()  # an earlier process may not have published the newest version
        self.needed: frozenset[int] = frozenset()
        """Versions that must stay in the log: the one that is written, and the base of the next delta."""

    def committed(self) -> None:
        """Note that there is a newer version."""
        self._committed.set()

    async def _publish_next(self) -> None:
        await self._committed.wait()
        self._committed.clear()
        try:
            await asyncio.to_thread(self.publish)
        except (RolloutServiceError, OSError) as error:
            self._committed.set()
            if isinstance(error, LogCorrupt):
                self._base = None  # it may be the base that is damaged: the next attempt needs none
            raise

    def publish(self) -> None:
        """Write the newest version, unless it is published. Version 0 is not: followers make it from ``model.path``.

        Raises VersionConflict for a store of another log, NotReady for one that cannot be reached, LogCorrupt.
        """
        head, base = self._log.head(), self._base
        if head is None or head.version == 0 or (base is not None and base.version == head.version):
            return
        self.needed = frozenset({head.version} | ({base.version} if base is not None else set()))
        version = self._log.manifest(head.version)
        with open_store(self._store) as (files, path):
            files.makedirs(path, exist_ok=True)
            if base is not None or not self._is_there(files, path, version):
                if self._links == MAX_LINKS:
                    base = None
                is_whole = self._write(files, f"{path}/{folder_name(str(head.version))}", version, base)
                self._base, self._links = version, 0 if is_whole else self._links + 1
                if is_whole:
                    self._wholes = [*self._wholes[-1:], version.version]
                    self._remove_old(files, path)
        self.needed = frozenset({head.version})

    def _is_there(self, files: Any, path: str, version: Manifest) -> bool:
        """Return True if an earlier process has published this version. Raises VersionConflict for another log's."""
        try:
            newest = next(published_numbers(files, path), 0)
        except FileNotFoundError:  # object stores have no empty folders
            return False
        if not newest:
            return False
        index = json.loads(files.cat_file(f"{path}/{folder_name(str(newest))}/{INDEX_FILE}"))
        digest = index.get("metadata", {}).get("manifest_digest")
        if digest is not None and newest < version.version:
            return False
        if (newest, digest) == (version.version, version.digest):
            return True
        raise VersionConflict(
            f"{self._store} has version {newest}, and the log version {version.version} with the digest "
            f"{version.digest}: they are of different runs; set weights.publish to an empty store",
            {"published": newest, "version": version.version},
        )

    def _write(self, files: Any, folder: str, version: Manifest, base: Manifest | None) -> bool:
        """Write a version, as changes to ``base`` if they are few. Return True if it is whole."""
        metadata: dict[str, Any] = {
            "version": f"{version.version:06d}",
            "checksum_format": "xxh3-128",
            "manifest_digest": version.digest,
        }
        if version.kv_scales is not None:
            metadata["kv_scales"] = version.kv_scales
        changes = None if base is None else self._changes(base, version)
        files.makedirs(folder, exist_ok=True)
        if base is None or changes is None:
            metadata["checksums"] = self._checksums(version)
            local = self._log.folder(version.version)
            for _ in in_threads(lambda name: files.put_file(str(local / name), f"{folder}/{name}"), [*version.files()]):
                pass
            listed = {tensor.name: tensor.file for tensor in version.tensors}
        else:
            metadata |= {"base_version": f"{base.version:06d}", "delta_encoding": "xor", "compression_format": "zstd"}
            listed = dict.fromkeys(changes, "model-00001-of-00001.safetensors")
            if changes:
                files.pipe_file(f"{folder}/model-00001-of-00001.safetensors", _as_file(changes))
        index = json.dumps({"metadata": metadata, "weight_map": listed}).encode()
        # Readers look for the index, and must not find a part of it. A process that is ending may still write its own.
        unfinished = f"{folder}/{uuid.uuid4().hex}.tmp"
        files.pipe_file(unfinished, index)
        files.mv(unfinished, f"{folder}/{INDEX_FILE}")
        return changes is None

    def _remove_old(self, files: Any, path: str) -> None:
        """Remove versions that no follower needs, also unfinished ones: those before the last whole version but one."""
        if len(self._wholes) < 2:
            return  # without listing the store
        for number in all_numbers(files, path):
            if number < self._wholes[0]:
                files.rm(f"{path}/{folder_name(str(number))}", recursive=True)

    def _checksums(self, version: Manifest) -> dict[str, str]:
        with VersionReader(self._log.folder(version.version), version) as reader:
            sums = in_threads(lambda tensor: xxhash.xxh3_128_hexdigest(_read(reader, tensor).data), version.tensors)
            return {tensor.name: found for tensor, found in zip(version.tensors, sums, strict=True)}

    def _changes(self, base: Manifest, version: Manifest) -> Mapping[str, _Change] | None:
        """Return the changed tensors; None: they are too many."""
        before = {tensor.name: tensor for tensor in base.tensors}
        changed = [tensor for tensor in version.tensors if before[tensor.name].digest != tensor.digest]
        found, nbytes = dict[str, _Change](), 0
        with (
            VersionReader(self._log.folder(base.version), base) as old,
            VersionReader(self._log.folder(version.version), version) as new,
        ):

            def change(tensor: StoredTensor) -> _Change:
                data = _read(new, tensor)
                frame = zstandard.compress((_read(old, before[tensor.name]) ^ data).data, 1)
                return _Change(frame, xxhash.xxh3_128_hexdigest(data.data))

            for tensor, each in zip(changed, in_threads(change, changed), strict=True):
                found[tensor.name] = each
                nbytes += len(each.frame)
                if nbytes > _MAX_SHARE * version.total_bytes:
                    return None
        return found


def _read(reader: VersionReader, tensor: StoredTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a tensor. Raises LogCorrupt."""
    data = np.empty(tensor.nbytes, np.uint8)
    for piece in pieces(((tensor, chunk) for chunk in tensor.chunks()), tensor.nbytes):
        reader.read(piece, data.data)
    return data


def _as_file(changes: Mapping[str, _Change]) -> bytes:
    """Return a safetensors file of changes."""
    arrays = {name: np.frombuffer(change.frame, np.uint8) for name, change in changes.items()}
    return safetensors.numpy.save(arrays, metadata={name: change.checksum for name, change in changes.items()})
