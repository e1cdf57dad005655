"""The whole service at one moment, as the ingest tells it to the gateway, for ``GET /metrics``."""

from pydantic import Field

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.fleet import Fleet
from rollout_service.protocol.weights import WeightStatus


class KVScalesState(Frozen):
    """Scales of the FP8 KV cache."""

    by_version: dict[int, dict[str, float]] = Field(default_factory=dict)
    """Version → ``<attention layer>.{q,k,v}_scale`` → scale; not of those with 1 everywhere, or that await theirs."""
    drift: float | None = None
    """The largest factor, less 1, between one of the newest and the same one of the version before; None: not known."""


class DurableState(Frozen):
    """What outlives the ingest's machine."""

    version: int | None
    """The newest version that is durable."""
    never_durable: int = 0
    """Versions that were dropped and had never been durable, since the ingest started."""
    log_bytes: int | None = None
    """Of ``weights.durable_root``, if there is one."""
    log_free_bytes: int | None = None


class ServiceState(Frozen):
    """The service at one moment."""

    at: float
    """Unix time, in seconds."""
    fleet: Fleet
    versions: tuple[WeightStatus, ...]
    """On disk or staged, oldest first."""
    committed_at: dict[int, float]
    """Version → Unix time in seconds; versions that are not on disk any more among them."""
    replicas_min: int
    replicas_max: int
    replica_starts: int
    """Replicas that came since the ingest started."""
    replica_failures: int
    """Those that failed, or went without having drained."""
    log_bytes: int
    log_free_bytes: int
    kv_scales: KVScalesState = KVScalesState()
    durable: DurableState | None = None
    """None: the log is in memory alone."""
