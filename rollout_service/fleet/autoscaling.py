"""Autoscaling of engines, decided by their load, not by the number of requests.

    replica.record_autoscaling_stats()  →  Serve's controller  →  RolloutAutoscaling  →  decide()

``decide`` is a pure function over plain data. ``RolloutAutoscaling`` wraps it as a custom policy of Ray Serve. Serve
ships this module to its controller by value, so it imports nothing but the standard library and Ray.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import ReplicaID

logger = logging.getLogger("ray.serve")

RUNNING, WAITING, KV_USAGE = "sequences_running", "sequences_waiting", "kv_usage"
VERSION, SERVING, BLOCKED = "version", "serving", "blocked_starts"
"""Keys of ``record_autoscaling_stats``; ``serving`` is 1 while the replica is ready and not paused, else 0.
``blocked_starts`` is the number of replicas of the fleet that wait for a GPU whose memory another process holds."""

SILENT_AFTER_S = 30.0
"""Time in seconds after which a replica's last stats are ignored. Replicas send stats every 10 s."""


@dataclass(frozen=True)
class ReplicaLoad:
    """The load of one replica at one moment."""

    sequences: float
    """Running and waiting sequences."""
    kv_usage: float
    """Share of the KV cache's blocks that sequences hold, 0 to 1."""
    version: int
    serving: bool
    """True if the replica is ready and not paused; otherwise its load does not show the demand."""


@dataclass(frozen=True)
class Goals:
    """Bounds, targets and delays; the fields of ``ScalingConfig``."""

    min_replicas: int
    max_replicas: int
    target_sequences: float
    target_kv_usage: float
    upscale_delay_s: float
    downscale_delay_s: float

    def bounded(self, replicas: int) -> int:
        """Clamp ``replicas`` to the bounds."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


@dataclass(frozen=True)
class Memory:
    """State that is passed from one decision to the next."""

    at_s: float
    """Time of the decision in seconds."""
    direction: int = 0
    """1: more replicas were wanted than exist; -1: fewer; 0: neither."""
    lasted_s: float = 0.0
    """Duration of that direction in seconds, without times in which no decision was possible."""
    most_wanted: int = 0
    """Maximum number of replicas wanted in that time."""


def reason_to_hold(fleet: Sequence[ReplicaLoad | None]) -> str | None:
    """Return the reason for keeping the number of replicas; None if it may change. ``None`` in ``fleet``: unknown
    load."""
    if not fleet:
        return "no replica is running yet"
    known = [load for load in fleet if load is not None]
    if len(known) < len(fleet):
        return "a replica has not said what it does"
    if not all(load.serving for load in known):
        return "a replica is paused, syncing or not sound"
    if len({load.version for load in known}) > 1:
        return "replicas serve different versions"
    return None


def wanted_replicas(fleet: Sequence[ReplicaLoad], goals: Goals) -> int:
    """Return the minimum number of replicas for which neither target is exceeded, within the bounds."""
    by_sequences = sum(load.sequences for load in fleet) / goals.target_sequences
    by_kv = sum(load.kv_usage for load in fleet) / goals.target_kv_usage
    # the tolerance is for rounding errors of sums: 0.3 + 0.5 is slightly more than 0.8
    return goals.bounded(math.ceil(max(by_sequences, by_kv) - 1e-9))


def decide(
    fleet: Sequence[ReplicaLoad | None], target: int, goals: Goals, memory: Memory, now_s: float
) -> tuple[int, Memory]:
    """Return the number of replicas to run, given that ``target`` are running or starting.

    It increases after more were wanted for ``upscale_delay_s``. It decreases after fewer were wanted for
    ``downscale_delay_s``, to the maximum that was wanted in that time. The step from one replica to zero is taken
    alone.
    """
    known = [load for load in fleet if load is not None]
    if reason_to_hold(fleet) is not None:
        return goals.bounded(target), replace(memory, at_s=now_s)
    wanted = wanted_replicas(known, goals)
    direction = (wanted > target) - (wanted < target)
    if direction == 0:
        return target, Memory(now_s)
    if direction == memory.direction:
        lasted_s = memory.lasted_s + max(0.0, now_s - memory.at_s)
        memory = Memory(now_s, direction, lasted_s, max(wanted, memory.most_wanted))
    else:
        memory = Memory(now_s, direction, 0.0, wanted)
    if memory.lasted_s < (goals.upscale_delay_s if direction > 0 else goals.downscale_delay_s):
        return goals.bounded(target), memory
    if direction > 0:
        return wanted, Memory(now_s)
    fewest = max(memory.most_wanted, min(1, target - 1))
    return goals.bounded(min(fewest, target)), Memory(now_s)  # a redeployment may have lowered the target meanwhile


def decide_beside_blocked(
    fleet: Sequence[ReplicaLoad | None], target: int, blocked: int, goals: Goals, memory: Memory, now_s: float
) -> tuple[int, Memory]:
    """Return ``decide``'s result if ``blocked`` of the ``target`` replicas wait for a GPU that another process uses.

    Blocked replicas do not serve, so as many more are requested. They are kept, since Ray would otherwise assign the
    same GPU again. When fewer replicas are wanted, Serve first stops those that have not started.
    """
    useful = target - blocked
    wanted, memory = decide(fleet, useful, goals, memory, now_s)
    if wanted > useful:
        return goals.bounded(wanted + blocked), memory
    return goals.bounded(target if wanted == useful else wanted), memory


class Point(Protocol):
    """One value of a time series in Serve."""

    timestamp: float
    """Unix time in seconds."""
    value: float


def fleet_at_one_moment(
    metrics: Mapping[str, Mapping[ReplicaID, Sequence[Point]]], replicas: Sequence[ReplicaID], now_s: float
) -> list[ReplicaLoad | None]:
    """Return every replica's load at the last moment that all reports cover: at different moments, versions would
    differ."""
    serving = metrics.get(SERVING, {})
    ends = {replica: serving[replica][-1].timestamp for replica in replicas if serving.get(replica)}
    recent = {replica: end for replica, end in ends.items() if now_s - end <= SILENT_AFTER_S}
    moment = min(recent.values(), default=now_s)

    def then(key: str, replica: ReplicaID) -> float:
        points = metrics[key][replica]
        return next((p.value for p in reversed(points) if p.timestamp <= moment), points[0].value)

    return [
        ReplicaLoad(
            sequences=then(RUNNING, replica) + then(WAITING, replica),
            kv_usage=then(KV_USAGE, replica),
            version=int(then(VERSION, replica)),
            serving=bool(then(SERVING, replica)),
        )
        if replica in recent
        else None
        for replica in replicas
    ]


def blocked_starts(
    metrics: Mapping[str, Mapping[ReplicaID, Sequence[Point]]], replicas: Sequence[ReplicaID], most: int
) -> int:
    """Return the number of replicas that wait for a GPU, by the most recent report; at most ``most``."""
    told = metrics.get(BLOCKED, {})
    last = max(
        (told[replica][-1] for replica in replicas if told.get(replica)), key=lambda p: p.timestamp, default=None
    )
    return 0 if last is None else max(0, min(most, int(last.value)))


class RolloutAutoscaling:
    """Ray Serve's custom autoscaling policy; one per deployment, in the controller. Serve's own delays must be 0.

    From zero replicas, Serve starts the first one itself when a call waits at a handle, without asking a policy.
    """

    def __init__(
        self, target_sequences: float, target_kv_usage: float, upscale_delay_s: float, downscale_delay_s: float
    ) -> None:
        self._goals = Goals(0, 0, target_sequences, target_kv_usage, upscale_delay_s, downscale_delay_s)
        self._held: str | None = None
        self._blocked = 0

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, object]]:
        """Serve's hook, called ten times a second. Return the target, and the state for the next call."""
        goals = replace(
            self._goals,
            min_replicas=ctx.capacity_adjusted_min_replicas,
            max_replicas=ctx.capacity_adjusted_max_replicas,
        )
        fleet = fleet_at_one_moment(ctx.raw_metrics or {}, ctx.running_replicas, ctx.current_time)
        memory = Memory(**ctx.policy_state.get("memory", {"at_s": ctx.current_time}))
        starting = ctx.target_num_replicas - len(ctx.running_replicas)
        blocked = blocked_starts(ctx.raw_metrics or {}, ctx.running_replicas, starting)
        target, memory = decide_beside_blocked(fleet, ctx.target_num_replicas, blocked, goals, memory, ctx.current_time)
        self._log(fleet, ctx.target_num_replicas, target, blocked)
        return target, {"memory": asdict(memory)}

    def _log(self, fleet: Sequence[ReplicaLoad | None], before: int, after: int, blocked: int) -> None:
        if blocked != self._blocked:
            logger.warning("autoscaling: %d replicas wait for GPUs whose memory another process holds", blocked)
        self._blocked = blocked
        held = reason_to_hold(fleet)
        if held != self._held:
            logger.info("autoscaling: %s", "free to decide" if held is None else f"holding, for {held}")
        self._held = held
        if before != after:
            loads = ", ".join(f"{load.sequences:.0f} at {load.kv_usage:.0%} KV" for load in fleet if load is not None)
            logger.info("autoscaling: %d → %d replicas; sequences: %s", before, after, loads)
