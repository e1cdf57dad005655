"""Summaries of committed versions, which the ingest keeps in memory."""

from typing import NamedTuple

from rollout_service.protocol.base import Failure
from rollout_service.protocol.weights import KVScalesFrom, UploadTimings
from rollout_service.store.manifest import Manifest
from rollout_service.store.upload_record import UploadRecord


class VersionSummary(NamedTuple):
    """The part of a manifest that statuses and metrics need, without its tensors, which may be 40 000."""

    digest: str
    """Digest in LATEST, by which replicas identify the version."""
    total_bytes: int
    kv_scales_from: KVScalesFrom
    label: str | None
    rollback_of: int | None
    delta_of: int | None
    uploaded_bytes: int | None
    timings: UploadTimings | None

    @classmethod
    def of(cls, manifest: Manifest, digest: str, record: UploadRecord | None) -> "VersionSummary":
        """Summarize a version. ``digest``: as committed; computing it takes long. ``record``: of its upload."""
        pushed = None if manifest.rollback_of is not None else record
        begin = None if pushed is None else pushed.begin
        return cls(
            digest,
            manifest.total_bytes,
            manifest.kv_scales_from,
            manifest.label,
            manifest.rollback_of,
            None if begin is None or begin.delta is None else begin.delta.base,
            None if pushed is None else pushed.uploaded_bytes,
            None if pushed is None else pushed.timings,
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
