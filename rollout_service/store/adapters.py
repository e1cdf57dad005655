"""Versions of LoRA adapters, beside the weight versions in the log's folder.

    <root>/ADAPTERS                               the committed versions, oldest first; replaced by atomic rename
    <root>/adapters/<name>/<version>-<digest>/    PEFT's two files; immutable
    <root>/adapters.staging/<digest>/             an upload that is not committed

A version exists if ADAPTERS names it. The ingest writes; replicas read and compare digests. A node without the log has
the folders of its copies at the same place below the root of its copies.
"""

import errno
import hashlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import xxhash
from pydantic import ValidationError

from rollout_service.errors import LogCorrupt
from rollout_service.protocol.adapters import CONFIG_FILE, TENSORS_FILE, AdapterVersion
from rollout_service.protocol.base import Frozen, wrong_fields
from rollout_service.store.durable_io import (
    is_unlocked,
    lock_shared,
    remove_tree,
    replace_synced,
    sync_folder,
    write_synced,
)

logger = logging.getLogger(__name__)

ADAPTER_FILES = (CONFIG_FILE, TENSORS_FILE)
_FOLDER = re.compile(r"\d+-(\w+)")
"""Name of a version's folder: its number and its digest."""


class _Index(Frozen):
    """Content of ADAPTERS."""

    versions: tuple[AdapterVersion, ...] = ()


class AdapterStore:
    """Reads and writes the adapters of one log."""

    def __init__(self, root: Path) -> None:
        self._index, self._folder = root / "ADAPTERS", root / "adapters"
        self._staging = root / "adapters.staging"

    def read(self) -> tuple[AdapterVersion, ...]:
        """Return the committed versions, oldest first. Raises LogCorrupt, OSError."""
        try:
            return _Index.model_validate_json(self._index.read_bytes()).versions
        except FileNotFoundError:
            return ()
        except ValidationError as error:
            raise LogCorrupt(f"{self._index} does not parse: {wrong_fields(error)}") from error

    def set(self, versions: Iterable[AdapterVersion]) -> None:
        """Replace the list of committed versions. Raises OSError."""
        # an earlier release refuses fields that it does not know
        replace_synced(self._index, _Index(versions=tuple(versions)).model_dump_json(exclude_defaults=True))

    def folder(self, adapter: AdapterVersion) -> Path:
        """Return the folder of a committed version."""
        return self._folder / adapter.folder

    def staging(self, digest: str) -> Path:
        """Return the folder of an upload."""
        return self._staging / digest

    def clear_staging(self) -> None:
        """Remove all uploads."""
        remove_tree(self._staging)

    def take_in(self, adapter: AdapterVersion, staged: Path) -> None:
        """Move a staged folder to its final place, durably; ``set`` commits it. Raises OSError."""
        remove_tree(self.folder(adapter))  # of a commit that a crash interrupted
        self._move_in(adapter, staged)

    def _move_in(self, adapter: AdapterVersion, staged: Path) -> None:
        folder = self.folder(adapter)
        for file in staged.iterdir():
            if file.name not in ADAPTER_FILES:
                file.unlink()
        for name in ADAPTER_FILES:
            with (staged / name).open("rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(staged)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.rename(staged, folder)
        sync_folder(folder.parent)
        sync_folder(self._folder)  # the folder of the name may be new

    def sweep(self, needed: Collection[AdapterVersion], held: Collection[str] = ()) -> None:
        """Remove the folders of all other versions, unless a process of this machine holds them (``hold``).

        What cannot be removed now is left for the next call. ``held``: digests of versions that processes of other
        machines hold.
        """
        kept = {self.folder(adapter) for adapter in needed}
        try:
            for folder in self._folder.glob("*/*"):
                of_version = _FOLDER.fullmatch(folder.name)  # a trainer may save others below weights.root
                if of_version and folder not in kept and of_version[1] not in held and is_unlocked(folder):
                    remove_tree(folder)
            for named in self._folder.glob("*"):
                if not any(named.iterdir()):
                    named.rmdir()
        except OSError as error:  # another replica of the node may remove the same copies
            logger.warning("some files of adapters are removed later: %s", error)

    def hold(self, adapter: AdapterVersion) -> int:
        """Lock a folder against ``sweep`` until the returned descriptor is closed. Raises OSError."""
        return lock_shared(self.folder(adapter))

    def verify(self, adapter: AdapterVersion) -> None:
        """Read both files and compare the digest. Raises LogCorrupt, OSError."""
        if (found := digest_of(self.folder(adapter))) != adapter.digest:
            raise LogCorrupt(
                f"adapter {adapter} in {self.folder(adapter)} hashes to {found}, and was committed as "
                f"{adapter.digest}: push it again"
            )

    def add_copy(self, adapter: AdapterVersion, files: Mapping[str, bytes]) -> None:
        """Add a fetched copy, which is complete. Raises LogCorrupt, OSError."""
        staged = self.staging(uuid.uuid4().hex)
        staged.mkdir(parents=True)
        try:
            for name, content in files.items():
                write_synced(staged / name, content)
            if digest_of(staged) != adapter.digest:
                raise LogCorrupt(f"adapter {adapter} was damaged on its way from the ingest")
            try:
                self._move_in(adapter, staged)
            except OSError as error:
                # another replica of this node has added it, and its engine may be reading it
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def digest_of(folder: Path) -> str:
    """Return the digest of an adapter's two files. Raises OSError."""
    return adapter_digest((folder / CONFIG_FILE).read_bytes(), tensors_digest(folder))


def tensors_digest(folder: Path) -> str:
    """Return xxh3-128 of an adapter's tensors' file, in hex. Raises OSError."""
    with (folder / TENSORS_FILE).open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def adapter_digest(config: bytes, tensors: str) -> str:
    """Return the digest of an adapter. ``tensors``: see ``tensors_digest``."""
    return xxhash.xxh3_128_hexdigest(config + tensors.encode())
