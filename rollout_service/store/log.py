"""The log of weight versions, which every replica follows.

    <root>/LATEST                      {"version", "digest", "mode", …}, replaced by atomic rename
    <root>/<version>/manifest.json     beside the safetensors files it lists; immutable
    <root>/<version>/upload.json       digests of the parts of its upload
    <root>/staging/<version>/          an upload that is not committed; its parts are in <version>.parts/
    <root>/CONTROL                     {"paused", "mode", "order"}: the operator's last request to the fleet
    <root>/KV_CACHE                    {"dtype", "why", "judged_by"}: of the KV cache, once it was measured
    <root>/FLEET                       {"replicas"}: live replicas, for an ingest that restarts
    <root>/LABELS                      {"through", "labels"}: version of each label, including dropped versions
    <root>/ORIGIN                      {"log", "writer"}: tells a replica if it sees the same log as the ingest
    <root>/ADAPTERS, adapters/         versions of LoRA adapters: see store/adapters.py
    <root>/spare/                      in a log in memory: files of a dropped version, for reuse
    <root>/copies/<log>/               on a node without the log: a log of the versions that it has fetched
    <root>/LOCK                        held by the one process that writes

Versions up to the one that LATEST names are committed. One process writes (the ingest), any number read. A folder newer
than LATEST is left over from a crash between the two renames, and counts as not committed.
"""

import errno
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import xxhash
from pydantic import Field, ValidationError

from rollout_service.errors import LogCorrupt, LogUnreadable, NotFound
from rollout_service.protocol.base import Frozen, wrong_fields
from rollout_service.protocol.fleet import KVCacheChoice, PauseMode
from rollout_service.protocol.weight_log import Control, Head, Origin
from rollout_service.runtime.threads import in_threads
from rollout_service.store.durable_io import (
    DISK_FULL,
    make_private,
    no_room,
    read_thrice,
    remove_tree,
    replace_synced,
    sync_folder,
    write_synced,
)
from rollout_service.store.manifest import (
    CHUNK_BYTES,
    MANIFEST_FILE,
    Manifest,
    ManifestDamaged,
    StoredTensor,
    read_manifest,
)
from rollout_service.store.mapped_files import SpareFiles
from rollout_service.store.reading import VersionReader
from rollout_service.store.upload_record import UploadRecord, recorded_manifest_digest, write_record

IN_MEMORY = "IN_MEMORY"
"""File in ``weights.disk_root`` with the path of the log, if ``weights.root`` is ``auto`` and the log is in memory."""
_DROPPED = ".dropped-"
_VERSION = re.compile("0|[1-9][0-9]*")
_CANNOT_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES})
"""Error numbers of file systems that do not support hard links, or allow no more of them."""


class KnownFleet(Frozen):
    """Content of FLEET."""

    replicas: frozenset[str] = frozenset()


class KnownLabels(Frozen):
    """Content of LABELS; see ``store/labels.py``."""

    through: int = -1
    """The last recorded version; labels of newer ones are only in their manifests."""
    labels: dict[str, int] = Field(default_factory=dict)


_Model = TypeVar("_Model", bound=Frozen)
_Found = TypeVar("_Found")


def log_at(folder: Path) -> Path:
    """Return the log in memory that a ``weights.disk_root`` names, or the folder itself. Raises OSError."""
    marker = folder / IN_MEMORY
    if not marker.is_file():
        return folder
    in_memory = Path(marker.read_text(encoding="utf-8", errors="replace").strip())
    # a restart of the host empties the memory, and the next log may lie on the disk
    return folder if (folder / "LATEST").is_file() and not (in_memory / "LATEST").is_file() else in_memory


class WeightLog:
    """Reads and writes a log; see the module's docstring for its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unconfirmed: dict[int, OSError] = {}
        """Versions that this process has committed, with the error of a disk that did not confirm LATEST as durable."""

    def head(self) -> Head | None:
        """Return the newest committed version, or None for an empty log. Raises LogCorrupt."""
        head = self._read("LATEST", Head)
        # the first commit is version 0: its folder alone, with a manifest, may be left over from a crash
        if head is None and any(v > 0 or not (self.folder(v) / MANIFEST_FILE).is_file() for v in self._folders()):
            raise LogCorrupt(
                f"{self.root} holds the versions {self._folders()} but no LATEST: put it back, or name another "
                "weights.root"
            )
        return head

    def control(self) -> Control:
        """Return the operator's last request to the fleet. Raises LogCorrupt."""
        return self._read("CONTROL", Control) or Control()

    def fleet(self) -> frozenset[str]:
        """Return the names of the replicas that were live when last recorded. Raises LogCorrupt."""
        return (self._read("FLEET", KnownFleet) or KnownFleet()).replicas

    def kv_cache(self) -> KVCacheChoice | None:
        """Return the dtype chosen for the KV cache; None before it was measured. Raises LogCorrupt."""
        return self._read("KV_CACHE", KVCacheChoice)

    def set_kv_cache(self, choice: KVCacheChoice) -> None:
        """Store the choice durably, so that replicas that start later make the same."""
        self._replace("KV_CACHE", choice)

    def origin(self) -> Origin | None:
        """Return the identity of the log; None before an ingest has signed it. Raises LogCorrupt."""
        return self._read("ORIGIN", Origin)

    def sign(self) -> Origin:
        """Record durably that this process writes the log."""
        known = self.origin()
        origin = Origin(log=known.log if known else uuid.uuid4().hex, writer=uuid.uuid4().hex)
        self._replace("ORIGIN", origin)
        return origin

    def labels(self) -> KnownLabels:
        """Return the recorded labels. Raises LogCorrupt."""
        return self._read("LABELS", KnownLabels) or KnownLabels()

    def set_labels(self, labels: KnownLabels) -> None:
        """Store the labels."""
        replace_synced(self.root / "LABELS", labels.model_dump_json())

    def set_fleet(self, replicas: frozenset[str]) -> None:
        """Record the live replicas durably: an ingest that restarts waits for them before it says what all serve."""
        self._replace("FLEET", KnownFleet(replicas=replicas))

    def set_control(self, control: Control) -> None:
        """Store the operator's request durably."""
        self._replace("CONTROL", control)

    def clear_control(self) -> None:
        """Remove the operator's request durably, also on a full disk. Raises OSError."""
        (self.root / "CONTROL").unlink(missing_ok=True)
        sync_folder(self.root)

    def folder(self, version: int) -> Path:
        """Return the folder of a committed version."""
        return self.root / str(version)

    def staging(self, version: int) -> Path:
        """Return the folder of an upload of ``version`` until it is committed."""
        return uploads_folder(self.root) / str(version)

    def versions(self) -> list[int]:
        """Return the committed versions that are still on disk, oldest first."""
        head = self.head()
        if head is None:
            return []
        return [version for version in self._folders() if version <= head.version]

    def manifest(self, version: int, digest: str | None = None) -> Manifest:
        """Return the manifest of a committed version. Raises NotFound or LogCorrupt.

        ``digest``: the digest that LATEST had for it; None: LATEST's current one, if it is the newest.
        """
        if version not in self.versions():
            raise NotFound(
                f"version {version} is not in the log; it holds {self.versions()}",
                {"version": version, "versions": self.versions()},
            )
        path = self.folder(version) / MANIFEST_FILE
        try:
            manifest = read_manifest(self.folder(version))
        except (FileNotFoundError, ManifestDamaged) as error:
            raise LogCorrupt(f"{path}: {error}") from error
        except OSError as error:
            raise LogUnreadable(f"{path} cannot be read: {error}; it is tried again") from error
        if manifest.version != version:
            raise LogCorrupt(f"{path} is of version {manifest.version}")
        if digest is None and (head := self.head()) is not None and head.version == version:
            digest = head.digest
        if digest is not None and digest != (found := manifest.digest):
            raise LogCorrupt(f"{path} has digest {found}, but LATEST says {digest}")
        return manifest

    def commit(self, manifest: Manifest, mode: PauseMode, record: UploadRecord | None = None) -> Head:
        """Commit the staged ``manifest.version`` as the newest. Its files must already be complete and synced.

        ``record``: the record of its upload. Raises OSError or LogUnreadable, and then the commit may be repeated. Once
        LATEST names it, it is committed, even if the disk reports an error afterwards, since replicas may have read it;
        see ``unconfirmed``.
        """
        staged, folder = self.staging(manifest.version), self.folder(manifest.version)
        if not staged.exists() and folder.exists() and manifest.version not in self.versions():
            os.rename(folder, staged)  # an earlier commit failed in between
        text = manifest.to_json()
        if record is not None:
            digest = xxhash.xxh3_128_hexdigest(text)
            write_record(staged, record.model_copy(update={"manifest_digest": digest}))
        write_synced(staged / MANIFEST_FILE, text)
        sync_folder(staged)
        self.remove_uncommitted()
        before = self.head()
        rolled_back_at = None if before is None else before.rolled_back_at
        os.rename(staged, folder)
        head = Head(
            version=manifest.version,
            digest=manifest.digest,
            mode=mode,
            label=manifest.label,
            rolled_back_at=rolled_back_at if manifest.rollback_of is None else manifest.version,
        )
        try:
            sync_folder(self.root)
        except OSError:  # for want of file descriptors, too: LATEST could not be read
            os.rename(folder, staged)
            raise
        try:
            unconfirmed = self._replace("LATEST", head)
        except OSError:
            if self.head() != head:
                os.rename(folder, staged)
                raise
            unconfirmed = None  # the rename has succeeded nevertheless
        self.unconfirmed = {} if unconfirmed is None else {**self.unconfirmed, manifest.version: unconfirmed}
        return head

    def remove_uncommitted(self) -> None:
        """Remove the folders that a crash left before LATEST was replaced; their parts are still staged.

        A folder that cannot be removed yet is renamed first, and tried again at the next call. Raises OSError.
        """
        committed = self.versions()
        for version in self._folders():
            if version not in committed:
                self._set_aside(version)
        self._remove_set_aside()

    def drop(self, version: int, spare: SpareFiles | None = None) -> None:
        """Remove a committed version that is not the newest. Raises ValueError for the newest, OSError.

        ``spare``: keeps its files for reuse by a later version.
        """
        head = self.head()
        if head is not None and head.version == version:
            raise ValueError(f"version {version} is the newest: replicas need it")
        dropped = self._set_aside(version)
        if spare is not None:
            spare.keep(dropped)
        self._remove_set_aside()

    def clear(self) -> None:
        """Remove all versions and staged uploads. Raises OSError."""
        (self.root / "LATEST").unlink(missing_ok=True)
        for version in self._folders():
            self._set_aside(version)
        remove_tree(uploads_folder(self.root))
        self._remove_set_aside()

    def adopt(self, head: Head, staged: Path) -> None:
        """Take in ``head.version`` from a folder that was committed elsewhere, complete and synced. Raises OSError.

        LATEST never goes back to an older version.
        """
        self.remove_uncommitted()
        known = self.head()
        os.rename(staged, self.folder(head.version))
        sync_folder(self.root)
        # an equal one may have the digest of a copy that was withdrawn until a crash
        if known is None or known.version <= head.version:
            self._replace("LATEST", head)

    def withdraw(self, version: int) -> None:
        """Remove an adopted version, even the newest: LATEST then names the one before, if there is one.

        Raises OSError, or ManifestDamaged for the manifest of the one before.
        """
        self._set_aside(version)
        head, left = self.head(), self.versions()
        if not left:
            (self.root / "LATEST").unlink()
        elif head is not None and head.version == version:
            manifest = read_manifest(self.folder(left[-1]))
            self._replace("LATEST", Head(version=left[-1], digest=manifest.digest, label=manifest.label))
        self.remove_uncommitted()

    def verify(
        self, manifest: Manifest, progress: Callable[[int], None] = lambda _: None, *, folder: Path | None = None
    ) -> None:
        """Read every byte of a version and compare its digests: tensors, headers, manifest and record.

        ``progress`` is called with the size of each tensor in bytes. ``folder``: its folder, if not committed yet.
        Raises LogCorrupt with tensor, chunk and file, or OSError.
        """
        verify_tensors(manifest, folder or self.folder(manifest.version), progress)
        self.verify_frame(manifest, folder=folder)

    def verify_frame(self, manifest: Manifest, *, folder: Path | None = None) -> None:
        """Verify everything but the bytes of tensors, which are checked when they are loaded. Reads little.

        Raises LogCorrupt with the file, or OSError.
        """
        folder = folder or self.folder(manifest.version)
        digest, text = recorded_manifest_digest(folder), (folder / MANIFEST_FILE).read_bytes()
        if digest not in (None, xxhash.xxh3_128_hexdigest(text)):
            raise LogCorrupt(
                f"{folder / MANIFEST_FILE} does not hash to {digest}: push the weights again under a newer version",
                {"version": manifest.version, "file": MANIFEST_FILE},
            )
        for file, (header, data_bytes) in manifest.places.headers.items():
            with (folder / file).open("rb") as stream:
                nbytes = os.fstat(stream.fileno()).st_size
                if nbytes != len(header) + data_bytes or stream.read(len(header)) != header:
                    raise LogCorrupt(
                        f"version {manifest.version}: {file} has {nbytes} of {len(header) + data_bytes} bytes, or its "
                        "header is not that of the tensors in the manifest: push the weights again under a newer "
                        "version",
                        {"version": manifest.version, "file": file},
                    )

    def _set_aside(self, version: int) -> Path:
        # rename atomically, so that no reader takes a half-removed version for damage; an earlier one of that number
        # may still be there
        dropped = self.root / f"{_DROPPED}{version}-{uuid.uuid4().hex}"
        os.rename(self.folder(version), dropped)
        return dropped

    def _remove_set_aside(self) -> None:
        for dropped in self.root.glob(f"{_DROPPED}*"):
            remove_tree(dropped)

    def _folders(self) -> list[int]:
        names: list[str] = _read_again(lambda: os.listdir(self.root), [])
        return sorted(int(name) for name in names if _VERSION.fullmatch(name))

    def _read(self, name: str, model: type[_Model]) -> _Model | None:
        if (text := _read_again((self.root / name).read_bytes, None)) is None:
            return None
        try:
            return model.model_validate_json(text)
        except ValidationError as error:
            raise LogCorrupt(f"{self.root / name} does not parse: {wrong_fields(error)}") from error

    def _replace(self, name: str, content: Frozen) -> OSError | None:
        make_private(self.root)
        return replace_synced(self.root / name, content.model_dump_json())


def _read_again(read: Callable[[], _Found], missing: _Found) -> _Found:
    """Return the result of ``read``, or ``missing`` if the file does not exist. Raises LogUnreadable.

    NFS returns ESTALE for a file that was replaced while it was opened; the next attempt opens the new one.
    """
    try:
        return read_thrice(read, {errno.ESTALE})
    except (FileNotFoundError, NotADirectoryError):
        return missing
    except OSError as error:
        raise LogUnreadable(f"the weight log cannot be read: {error}; it is tried again") from error


def uploads_folder(root: Path) -> Path:
    """Return the folder of a log's uploads; each is in a subfolder named by its version until it is committed."""
    return root / "staging"


def verify_tensors(manifest: Manifest, folder: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Read every byte of a version's tensors and compare their digests; ``progress`` and errors as ``verify``."""
    buffers = threading.local()

    def check(tensor: StoredTensor) -> int:
        if not hasattr(buffers, "mine"):  # allocating new memory for each read would take longer than reading
            buffers.mine = memoryview(bytearray(CHUNK_BYTES))
        try:
            return reader.check(tensor, buffers.mine)
        except ManifestDamaged as error:
            raise LogCorrupt(
                f"version {manifest.version}: {error}: push the weights again under a newer version",
                {"version": manifest.version, "tensor": tensor.name, "file": MANIFEST_FILE},
            ) from error

    with VersionReader(folder, manifest) as reader:
        for tensors in manifest.files().values():
            for nbytes in in_threads(check, tensors):
                progress(nbytes)


def stage_again(log: WeightLog, source: Manifest, version: int) -> Manifest:
    """Lay out the files of a kept version as ``version``, and return its manifest, ready for ``WeightLog.commit``.

    The files are hard links, if the file system supports them: dropping one version does not affect the other. Every
    byte is first read and compared with its digest. Raises LogCorrupt, InsufficientStorage or OSError, and then
    leaves no files behind. ``source``: the kept version's manifest.
    """
    folder, staged = log.folder(source.version), log.staging(version)
    log.verify(source)
    remove_tree(staged)
    try:
        staged.mkdir(parents=True)
        for file in source.places.files:
            _link(folder / file, staged / file)
    except OSError as error:
        remove_tree(staged)
        if error.errno in DISK_FULL:
            raise no_room(f"version {version}, a copy of {source.version},", log.root, source.total_bytes) from error
        raise
    return source.replace(version=version, rollback_of=source.version)


def _link(file: Path, path: Path) -> None:
    try:
        os.link(file, path)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(file, path)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
