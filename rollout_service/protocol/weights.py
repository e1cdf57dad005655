"""Weight versions as the service tells of them; how one is uploaded: ``upload``."""

from typing import Literal

from rollout_service.protocol.base import Failure, Frozen
from rollout_service.protocol.fleet import ReplicaStatus
from rollout_service.protocol.mismatch import Suspicion

VersionState = Literal["staged", "committed", "live"]
KVScalesFrom = Literal["trainer", "calibrate", "reuse", "unit"]


class TensorDigests(Frozen):
    """What one version holds."""

    version: int
    digests: dict[str, str]
    """Tensor → xxh3-128 in hex of its bytes, as engines load them."""


class UploadTimings(Frozen):
    """Where the seconds of a version went until it was stored. Stages overlap, so they do not add up to its upload."""

    receive_s: float
    """From its announcement until its last tensor, or part, had come; 0 of a folder, which the service reads itself."""
    quantize_s: float
    """Of all threads together: reading tensors from where they came to, quantizing, and checking them."""
    store_s: float
    """Of all threads together: putting tensors into the log, and hashing them."""
    finish_s: float
    """From the last tensor until all were stored, and synced to a disk if the log is on one."""


class WeightStatus(Frozen):
    """State of one weight version, from upload to live."""

    version: int
    label: str | None = None
    """What its trainer calls it."""
    rollback_of: int | None = None
    """The version whose weights these are again; None: they were pushed."""
    delta_of: int | None = None
    """The version of which it came as a delta; None: it came whole. Stored whole it is either way."""
    uploaded_bytes: int | None = None
    """What its trainer uploaded of it in parts: less than ``total_bytes`` if it came as a delta, and more in BF16. None
    while staged, or if it came otherwise."""
    state: VersionState
    """``live``: every live replica serves this version or a newer one."""
    durable: bool = False
    """Whether it outlives its machine: it is on a disk, synced. Of a staged version, and where the log is in memory
    alone, never. With ``weights.durability: behind`` a version is served before, and is never durable if a newer one
    has overtaken it on its way to the disk."""
    digest: str | None = None
    """xxh3-128 over the manifest; None while staged. KV scales that came with the version are part of it; those
    that the service measures are not. A rollback has the digest of the version that it restores."""
    total_bytes: int = 0
    kv_scales_from: KVScalesFrom | None = None
    """Where the scales of its FP8 KV cache come from, see docs/kv_scales.md; None while staged."""
    missing_parts: tuple[int, ...] = ()
    """Parts that a staged upload still lacks."""
    error: Failure | None = None
    """Why a staged version cannot be committed: mend the weights and begin it anew. Or what the disk did not confirm of
    a committed one, or why it could not be copied there."""
    timings: UploadTimings | None = None
    """None while staged, and of a rollback. Replicas tell of theirs: ``replicas``."""
    replicas: tuple[ReplicaStatus, ...] = ()
    suspect: tuple[Suspicion, ...] | None = None
    """Replicas on which its mismatch is above a threshold of ``monitor``; None: not asked, or the monitor is away."""
