"""Summaries of committed versions, which the ingest keeps in memory."""

from rollout_service.protocol.base import Failure
from rollout_service.protocol.weights import WeightStatus
from rollout_service.store.manifest import Manifest
from rollout_service.store.upload_record import UploadRecord


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
