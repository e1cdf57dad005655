"""Snapshot of the whole service, which the ingest sends to the gateway for ``GET /metrics``."""

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.fleet import Fleet
from rollout_service.protocol.weights import WeightStatus


class ServiceState(Frozen):
    """Snapshot of the service at one moment."""

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
