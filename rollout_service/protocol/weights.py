"""Weight versions as the service reports them. Uploads are described in ``upload``."""

from typing import Literal

from rollout_service.protocol.base import Failure, Frozen
from rollout_service.protocol.fleet import Fleet, ReplicaStatus
from rollout_service.protocol.mismatch import Suspicion

VersionState = Literal["staged", "committed", "live"]
KVScalesFrom = Literal["trainer", "reuse", "unit"]


class TensorDigests(Frozen):
    """Digests of the tensors of one version."""

    version: int
    digests: dict[str, str]
    """Tensor → xxh3-128 in hex of its bytes, as engines load them."""


class UploadTimings(Frozen):
    """Time in seconds that storing a version took, by stage. Stages overlap, so they do not add up to the total."""

    receive_s: float
    """Time from the announcement until the last tensor or part arrived; 0 for a folder, which the service reads
    itself."""
    quantize_s: float
    """Time of all threads together for reading, checking and quantizing tensors."""
    store_s: float
    """Time of all threads together for writing tensors to the log and hashing them."""
    finish_s: float
    """Time from the last tensor's arrival until all were stored, and synced if the log is on a disk."""


class WeightStatus(Frozen):
    """State of one weight version, from upload to live."""

    version: int
    label: str | None = None
    """The trainer's label of the version."""
    rollback_of: int | None = None
    """The version whose weights were restored; None: the weights were pushed."""
    delta_of: int | None = None
    """The base version, if it was uploaded as a delta; None: it was uploaded whole. It is stored whole in either
    case."""
    uploaded_bytes: int | None = None
    """Size in bytes of the uploaded parts: less than ``total_bytes`` for a delta, and more for BF16. None while staged,
    or if it came without parts."""
    state: VersionState
    """``live``: every live replica serves this version or a newer one."""
    digest: str | None = None
    """xxh3-128 over the manifest; None while staged. It covers the KV scales. A rollback has the digest of the version
    that it restores."""
    total_bytes: int = 0
    kv_scales_from: KVScalesFrom | None = None
    """Origin of the scales of its FP8 KV cache, see docs/kv_scales.md; None while staged."""
    missing_parts: tuple[int, ...] = ()
    """Parts that a staged upload still lacks."""
    error: Failure | None = None
    """Reason why a staged version cannot be committed: fix the weights and begin it again. For a committed version, the
    reason why the disk did not confirm it."""
    timings: UploadTimings | None = None
    """None while staged, and for a rollback. Timings of replicas are in ``replicas``."""
    replicas: tuple[ReplicaStatus, ...] = ()
    suspect: tuple[Suspicion, ...] | None = None
    """Replicas on which its mismatch is above a threshold of ``monitor``; None: not requested, or the monitor is
    unavailable."""


class ServiceState(Frozen):
    """Snapshot of the service at one moment, which the ingest sends to the gateway for ``GET /metrics``."""

    at: float
    """Unix time in seconds."""
    fleet: Fleet
    versions: tuple[WeightStatus, ...]
    """Versions on disk or staged, oldest first."""
    committed_at: dict[int, float]
    """Version → commit time, Unix time in seconds; also for versions no longer on disk."""
    replicas_min: int
    replicas_max: int
    replica_starts: int
    """Number of replicas that started since the ingest started."""
    replica_failures: int
    """Number of replicas that failed, or ended without draining."""
    log_bytes: int
    log_free_bytes: int
