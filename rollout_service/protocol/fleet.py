"""What replicas report of themselves, and the table of all of them."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollout_service.protocol.base import Frozen

PauseMode = Literal["keep", "wait", "abort"]
Staging = Literal["device", "host", "memory", "none"]
"""Where a version is read to, and checked, before an engine closes for it: memory of the GPU, pinned memory of the
host, plain memory, or nowhere."""
ReplicaState = Literal["starting", "syncing", "ready", "stale", "asleep", "draining", "failed"]
SleepTag = Literal["weights", "kv_cache"]
"""vLLM's names of what an engine's memory is for."""


class UpdateTimings(Frozen):
    """Seconds that one replica spent on one weight version, by stage."""

    stage_s: float
    """Reading and checking the bytes while the replica still served."""
    closed_s: float
    """From pause to resume: no token was made in this time."""
    load_s: float
    """The part of ``closed_s`` that vLLM spent loading."""


class KVCacheChoice(Frozen):
    """What the KV cache is kept in, and why."""

    dtype: Literal["fp8_e4m3", "bfloat16"]
    why: str
    judged_by: str = ""
    """The replica and version that were measured; empty: it was not measured, but configured."""


class KVCacheStatus(Frozen):
    """The KV cache of one replica."""

    choice: KVCacheChoice
    saturated: dict[str, tuple[float | None, float | None]] = Field(default_factory=dict)
    """Layer → share of k, of v beyond the largest code, with the scales that it serves with; as last measured. None:
    not a number, as k or v was."""
    measured_version: int | None = None
    """The version that was measured; None: none yet, by this replica."""
    measured_s: float | None = None
    """How long that took, in which the replica was closed."""
    unfit: dict[str, str] = Field(default_factory=dict)
    """Layer → why FP8 is not accurate enough for its k and v, as last measured."""


class AttentionStatus(Frozen):
    """The attention kernels of an engine."""

    backends: tuple[str, ...]
    """vLLM's names of those that its layers have; ``group`` is ours: docs/group_attention.md."""
    why: str


class EngineLoad(Frozen):
    """How busy one engine is, in sequences, as vLLM's scheduler counts them."""

    running: int
    waiting: int
    """For a place in the batch or for KV blocks."""
    deferred: int
    """Waiting for anything else, such as the end of a pause."""
    kv_cache_usage: float
    """Share of the KV cache's blocks in use, 0 to 1."""
    kv_cache_tokens: int
    """What the KV cache holds."""


class ReplicaStatus(Frozen):
    """What one live engine replica last said of itself."""

    replica_id: str
    sequence: int = 0
    """Grows with each report of a replica, so that one overtaken on its way is not taken for news."""
    version: int | None
    """The version it serves; None until it has loaded its first, and while it is asleep."""
    label: str | None = None
    """Of that version."""
    digest: str | None = None
    """What the log said of that version when it was loaded: a log that is restored from a backup may give its number to
    other weights."""
    log: str | None = None
    """The log that it follows, by the name in its file ORIGIN."""
    state: ReplicaState
    target: int | None = None
    """The version it is staging or loading right now."""
    paused: bool = False
    """A pause was asked for, and nothing runs any more."""
    obeyed: str = ""
    """The pause, resume, sleep or wake-up that it has obeyed last; while running rollouts are waited for, still the one
    before."""
    aborted: int = 0
    """The largest ``DesiredState.abort`` that it has obeyed."""
    running: int = 0
    """Sequences accepted and not yet answered."""
    error: str | None = None
    update: UpdateTimings | None = None
    """Timings of its last update."""
    staging: Staging | None = None
    """What ``engine.staging`` has come to; None until its engine runs."""
    kv_cache: KVCacheStatus | None = None
    """None until its engine runs."""
    attention: AttentionStatus | None = None
    """None until its engine runs."""
    load: EngineLoad | None = None
    """None until its engine runs."""
    age_s: float = 0.0
    """Seconds since it last reported."""


class FailedStart(Frozen):
    """A replica that ended before it served."""

    replica_id: str
    reason: str
    """What failed and what caused it, the deepest last."""
    at: float
    """Unix time, in seconds."""


class FailedStarts(Frozen):
    """The last series of starts that failed, one after the other."""

    tries: int
    first: FailedStart
    last: FailedStart
    over: bool
    """A replica has served its first version since."""


class LogPlace(Frozen):
    """Where the log lies on the ingest's node."""

    root: Path
    why: str
    """Why it lies there: free memory in numbers, if ``weights.root`` is ``auto``."""


class Fleet(Frozen):
    """The table of live replicas beside the newest committed version."""

    latest_version: int
    latest_label: str | None = None
    paused: bool
    asleep: bool = False
    """The engines were asked to give their memory back: ``POST /sleep``."""
    replicas: tuple[ReplicaStatus, ...]
    failed_starts: FailedStarts | None = None
    """None: no start failed since the ingest started."""

    @property
    def blocked_starts(self) -> int:
        """The number of replicas without an engine, for another process holds the memory of their GPUs."""
        return sum(replica.state == "starting" and replica.error is not None for replica in self.replicas)

    log: LogPlace | None = None
