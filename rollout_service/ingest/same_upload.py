"""Compares an announcement with an earlier one of the same version."""

import xxhash

from rollout_service.errors import VersionConflict
from rollout_service.protocol.base import NEXT
from rollout_service.protocol.upload import BeginUpload, with_kv_scales
from rollout_service.protocol.weight_log import Head
from rollout_service.store.upload_record import UploadRecord


def require_same(known: UploadRecord, begin: BeginUpload, stamp: str | None, head: Head | None) -> None:
    """Raise VersionConflict if ``begin`` differs from the committed announcement.

    Args:
        stamp: present stamp of the announced path; None: of another source, or of another path.
        head: the newest version.
    """
    if begin.label is not None and begin.label != known.begin.label:
        raise VersionConflict(
            f"version {begin.version} is committed with {_spelled(known.begin.label)}, and {_spelled(begin.label)} "
            f"now: leave the label out, or push version {NEXT!r}",
            {"version": begin.version, "labels": [known.begin.label, begin.label]},
        )
    mine, theirs = _announced_digest(known.begin), _announced_digest(begin)
    if stamp is not None:
        mine, theirs = known.source_stamp, stamp
    if mine == theirs:
        return
    raise VersionConflict(
        f"version {begin.version} is committed with {_difference(known.begin, begin)} ({mine}, and {theirs} now): push "
        f"a newer version, such as {NEXT!r}, or go back to a kept one by POST /v1/weights/rollback",
        {
            "version": begin.version,
            "digests": [mine, theirs],
            "latest_version": head and head.version,
            "latest_digest": head and head.digest,
        },
    )


def _announced_digest(begin: BeginUpload) -> str:
    text = begin.model_dump_json(include={"tensors", "source", "delta"})
    return with_kv_scales(xxhash.xxh3_128_hexdigest(text.encode()), begin.kv_scales)


def _spelled(label: str | None) -> str:
    return "no label" if label is None else f"the label {label!r}"


def _difference(known: BeginUpload, begin: BeginUpload) -> str:
    """Describe the difference between two announcements of one version, or between two readings of the same path."""
    if known.describes_what(begin):
        return "another content under that path"
    if known.describes_what(begin.model_copy(update={"kv_scales": known.kv_scales})):
        return "other KV scales"
    if begin.source is None and known.tensors == begin.tensors:
        return "a delta of another base" if known.delta and begin.delta else "tensors where one has a delta"
    return "another tensor table"
