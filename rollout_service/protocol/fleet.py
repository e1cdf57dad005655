"""Status reports of replicas, and the table of all replicas."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollout_service.protocol.adapters import HeldAdapter
from rollout_service.protocol.base import Frozen, KnownVersion

PauseMode = Literal["keep", "wait", "abort"]
Staging = Literal["device", "host", "memory", "none"]
"""The memory into which a version is read and checked before an engine pauses for it: GPU memory, pinned host memory,
ordinary host memory, or none."""
ReplicaState = Literal["starting", "syncing", "ready", "stale", "asleep", "draining", "failed"]
SleepTag = Literal["weights", "kv_cache"]
"""vLLM's names for the uses of an engine's memory."""


class UpdateTimings(Frozen):
    """Time in seconds that one replica spent on one weight version, by stage."""

    stage_s: float
    """Time for reading and checking the bytes, while the replica still served."""
    closed_s: float
    """Time from pause to resume, in which no tokens were generated."""
    load_s: float
    """Part of ``closed_s`` that vLLM spent loading."""


class KVCacheChoice(Frozen):
    """The KV cache's dtype and the reason for it."""

    dtype: Literal["fp8_e4m3", "bfloat16"]
    why: str
    judged_by: str = ""
    """The replica and version whose measurement decided; empty: the dtype was configured."""


class KVCacheStatus(Frozen):
    """The KV cache of one replica."""

    choice: KVCacheChoice
    saturated: dict[str, tuple[float | None, float | None]] = Field(default_factory=dict)
    """Layer → share of k and of v beyond the largest FP8 code with the scales of the measured version. None: k or v
    was not a number."""
    measured_version: int | None = None
    """The version that was measured; None: this replica has measured none."""
    unfit: dict[str, str] = Field(default_factory=dict)
    """Layer → reason why FP8 is not accurate enough for its k and v with these scales."""


class AttentionStatus(Frozen):
    """The attention kernels of an engine."""

    backends: tuple[str, ...]
    """vLLM's names of the backends of its layers. ``group`` is this project's: see docs/group_attention.md."""
    why: str


class EngineLoad(Frozen):
    """The load of one engine in sequences, as vLLM's scheduler counts them."""

    running: int
    waiting: int
    """Sequences waiting for a place in the batch or for KV blocks."""
    deferred: int
    """Sequences waiting for anything else, such as the end of a pause."""
    kv_cache_usage: float
    """Share of the KV cache's blocks in use, 0 to 1."""
    kv_cache_tokens: int
    """Capacity of the KV cache in tokens."""


class ReplicaStatus(Frozen):
    """The last report of one live engine replica."""

    replica_id: str
    group: str | None = None
    """Its group in ``scaling.groups``: it serves the group's version, and not the newest. None: it has no group."""
    sequence: int = 0
    """Grows with each report of a replica, so that a report that arrives late is not taken for a newer one."""
    version: int | None
    """The version that it serves; None before it has loaded one, and while it is asleep."""
    label: str | None = None
    """The label of that version."""
    digest: str | None = None
    """Digest that the log had for the version at load time. A log restored from a backup may give the same number to
    other weights."""
    log: str | None = None
    """Identifier of the log that it follows, from the log's file ORIGIN."""
    state: ReplicaState
    target: int | None = None
    """The version that it is staging or loading now."""
    paused: bool = False
    """True once a requested pause has taken effect and nothing runs."""
    obeyed: str = ""
    """The last pause, resume, sleep or wake-up that it has completed. While it waits for running rollouts, still the
    one before."""
    aborted: int = 0
    """The largest ``DesiredState.abort`` that it has completed."""
    running: int = 0
    """Sequences accepted and not yet answered."""
    takes_memory: bool = False
    """True once its engine may have allocated GPU memory, and while it sleeps."""
    error: str | None = None
    update: UpdateTimings | None = None
    """Timings of its last update."""
    staging: Staging | None = None
    """The staging that ``engine.staging`` resolved to; None until its engine runs."""
    kv_cache: KVCacheStatus | None = None
    """None until its engine runs."""
    attention: AttentionStatus | None = None
    """None until its engine runs."""
    load: EngineLoad | None = None
    """None until its engine runs."""
    adapters: tuple[HeldAdapter, ...] = ()
    """The adapter versions that it holds, or could not load."""
    age_s: float = 0.0
    """Seconds since its last report."""


class FailedStart(Frozen):
    """A replica that ended before it served."""

    replica_id: str
    reason: str
    """The error and its causes, the root cause last."""
    at: float
    """Unix time in seconds."""


class FailedStarts(Frozen):
    """The last series of consecutive failed starts."""

    tries: int
    first: FailedStart
    last: FailedStart
    over: bool
    """True once a replica has served its first version after these failures."""


class LogPlace(Frozen):
    """The location of the log on the ingest's node."""

    root: Path
    why: str
    """Reason for the location: free memory in numbers, if ``weights.root`` is ``auto``."""


class Pin(Frozen):
    """The weight version of a group of replicas."""

    pinned_to: KnownVersion
    """Number or label, from ``scaling.groups``."""
    version: int | None
    """The version that this means now. None: the log does not have it, and the group follows the newest version."""


class Fleet(Frozen):
    """The table of live replicas and the newest committed version."""

    latest_version: int
    latest_label: str | None = None
    paused: bool
    asleep: bool = False
    """True while engines are asked to release their memory: ``POST /sleep``."""
    replicas: tuple[ReplicaStatus, ...]
    groups: dict[str, Pin] = Field(default_factory=dict)
    """The groups of pinned replicas, by name. A replica's ``group`` is None if it follows the newest version."""
    failed_starts: FailedStarts | None = None
    """None: no start has failed since the ingest started."""

    @property
    def unpinned(self) -> tuple[ReplicaStatus, ...]:
        """Return the replicas that follow the newest version."""
        return tuple(replica for replica in self.replicas if replica.group is None)

    @property
    def blocked_starts(self) -> int:
        """Return the number of replicas that cannot start an engine, since another process holds the memory of their
        GPUs."""
        return sum(replica.state == "starting" and replica.error is not None for replica in self.unpinned)

    log: LogPlace | None = None
