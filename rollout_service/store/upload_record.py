"""Record of an upload, stored beside its parts while it is staged, and beside its manifest once it is committed.

The file has a JSON document, followed by a line with its xxh3-128. A record that a crash or a bad disk has damaged is
thus detected. The module also has the summaries of committed versions, which the ingest keeps in memory.
"""

import functools
import os
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash
from pydantic import ValidationError

from rollout_service.errors import LogCorrupt, VersionConflict
from rollout_service.protocol.base import NEXT, Failure, Frozen, wrong_fields
from rollout_service.protocol.upload import BeginUpload, Slot, upload_digest, with_kv_scales
from rollout_service.protocol.weights import UploadTimings, WeightStatus
from rollout_service.store.durable_io import read_sealed, write_sealed
from rollout_service.store.manifest import Manifest

RECORD_FILE = "upload.json"
STAGED_FILE, JOURNAL = "staged", "parts"
"""Names of the files beside a staged version's record: its parts, and a line about each received part."""


class UploadRecord(Frozen):
    """The record of an upload."""

    begin: BeginUpload
    part_bytes: int
    part_digests: tuple[str, ...] = ()
    """xxh3-128 of every part, in order; empty until the upload is complete."""
    delta_bytes: int | None = None
    """Size of all parts of a delta in bytes; None: of another upload, or until it is complete."""
    source_stamp: str = ""
    """Hash over names, sizes and times of a folder's files, which shows if they were changed since. For shared memory,
    the name of the transfer."""

    manifest_digest: str = ""
    """xxh3-128 of the file manifest.json; empty until the upload is committed."""
    timings: UploadTimings | None = None
    """None until the upload is complete."""

    @property
    def num_parts(self) -> int:
        """Return the number of parts of the whole upload."""
        return len(self.part_digests) or self.begin.num_parts(self.part_bytes)

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Return the place of each part."""
        return tuple(self.begin.slots(self.part_bytes))

    @property
    def uploaded_bytes(self) -> int | None:
        """Return the size of all parts in bytes, once they are there; None: its tensors came otherwise."""
        if self.begin.source is not None:
            return None
        return self.begin.nbytes if self.begin.delta is None else self.delta_bytes

    @property
    def upload_digest(self) -> str:
        """Return the digest of all parts, or the stamp of a source, together with the KV scales that came with it."""
        content = upload_digest(self.part_digests) if self.begin.source is None else self.source_stamp
        return with_kv_scales(content, self.begin.kv_scales)

    def require_meant(self, digest: str | None) -> None:
        """Raise VersionConflict if a committed version has other parts than the commit expects (None: any)."""
        if digest not in (None, self.upload_digest):
            raise VersionConflict(
                f"version {self.begin.version} is committed with parts that hash to {self.upload_digest}, and not to "
                f"the {digest} of this commit: push a newer version, such as {NEXT!r}",
                {"version": self.begin.version, "digests": [self.upload_digest, digest]},
            )


def source_stamp(folder: Path) -> str:
    """Return a hash over names, sizes and times of the safetensors in ``folder``, their index and the configuration.

    Tools set a file's modification time (``rsync -a``, ``cp -p``) and file systems round it, but no tool sets its inode
    and ctime. Each file is opened, because NFS asks the server for these only then. Raises OSError.
    """
    patterns = ("*.safetensors", "*.safetensors.index.json", "config.json")
    text = "\n".join(
        f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}\0{stat.st_ino}"
        for path in sorted(path for pattern in patterns for path in folder.glob(pattern))
        for stat in [_stat_opened(path)]
    )
    return xxhash.xxh3_128_hexdigest(text.encode())


def _stat_opened(path: Path) -> os.stat_result:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for the other end of a named pipe
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def write_record(folder: Path, record: UploadRecord) -> None:
    """Write ``record`` into ``folder``, durably and atomically."""
    write_sealed(folder / RECORD_FILE, record.model_dump_json(exclude_defaults=True))


def read_record(folder: Path) -> UploadRecord | None:
    """Read the record in ``folder``; None if there is none. Raises LogCorrupt for a damaged one."""
    text = read_sealed(folder / RECORD_FILE)
    try:
        return None if text is None else UploadRecord.model_validate_json(text)
    except ValidationError as error:
        raise LogCorrupt(f"{folder / RECORD_FILE} does not parse: {wrong_fields(error)}") from error


class ReceivedPart(NamedTuple):
    """A line of the journal."""

    part: int
    nbytes: int
    digest: str
    """xxh3-128 in hex."""


def note_received(folder: Path, part: ReceivedPart) -> None:
    """Append a received part to the journal in ``folder``. Raises OSError."""
    line = f"{part.part} {part.nbytes} {part.digest}\n".encode()
    with (folder / JOURNAL).open("ab+") as journal:
        end = journal.tell()
        # a crash or a full disk may have cut the last line, which would swallow this one
        is_cut = end > 0 and os.pread(journal.fileno(), 1, end - 1) != b"\n"
        journal.write(b"\n" + line if is_cut else line)


def read_received(folder: Path) -> list[ReceivedPart]:
    """Return the received parts by the journal in ``folder``; their bytes may be damaged. Raises OSError."""
    journal, found = folder / JOURNAL, dict[int, ReceivedPart]()
    for line in journal.read_text(errors="replace").splitlines() if journal.exists() else ():
        part, _, rest = line.partition(" ")
        nbytes, _, digest = rest.partition(" ")
        if part.isdecimal() and nbytes.isdecimal():
            # the last line counts: a part may have been replaced
            found[int(part)] = ReceivedPart(int(part), int(nbytes), digest)
    return list(found.values())


class _OfManifest(msgspec.Struct):
    """The only field of a record that every replica reads; parsing the others may mean 40 000 names."""

    manifest_digest: str = ""


def recorded_manifest_digest(folder: Path) -> str | None:
    """Return ``manifest_digest`` of the record in ``folder``; None if there is no record, or it has none.

    Raises LogCorrupt for a damaged record.
    """
    text = read_sealed(folder / RECORD_FILE)
    try:
        return None if text is None else msgspec.json.decode(text, type=_OfManifest).manifest_digest or None
    except msgspec.MsgspecError as error:
        raise LogCorrupt(f"{folder / RECORD_FILE} does not parse: {error}") from error


def summary_of(manifest: Manifest, digest: str, record: UploadRecord | None) -> WeightStatus:
    """Return the constant part of a committed version's status, without its tensors, which may be 40 000.

    ``digest``: as committed; computing it takes long. ``record``: of its upload.
    """
    pushed = None if manifest.rollback_of is not None else record
    begin = None if pushed is None else pushed.begin
    return WeightStatus(
        version=manifest.version,
        state="committed",
        digest=digest,
        total_bytes=manifest.total_bytes,
        kv_scales_from=manifest.kv_scales_from,
        label=manifest.label,
        rollback_of=manifest.rollback_of,
        delta_of=None if begin is None or begin.delta is None else begin.delta.base,
        uploaded_bytes=None if pushed is None else pushed.uploaded_bytes,
        timings=None if pushed is None else pushed.timings,
    )


def unconfirmed(error: OSError | None) -> Failure | None:
    """Return the displayed error of a committed version for which ``WeightLog.unconfirmed`` has one."""
    if error is None:
        return None
    return Failure(
        type=type(error).__name__,
        message=f"committed, but the disk did not confirm it ({error}): a power failure may undo it, until a newer "
        "version is committed without this error",
    )
