"""Who is live, what each replica serves, and what all of them are wished to do."""

import time

from rollout_service.types import Frozen, PauseMode, ReplicaStatus
from rollout_service.weights.starts import Starts


class Wish(Frozen):
    """What every replica should be like now. A replica that sees another wish than its last acts on it."""

    version: int
    paused: bool
    pause_mode: PauseMode


class FleetTable:
    """The last report of each replica; it leaves the table when it says so, or was silent for ``dead_after_s``.

    A replica that has not served yet stands in the table, but nobody waits for it: it gets no request before it is at
    the newest version.
    """

    def __init__(self, dead_after_s: float, may_be_empty: bool = False) -> None:
        """``may_be_empty``: without a live replica there is nobody to wait for; else one must be about to come."""
        self._dead_after_s, self._may_be_empty = dead_after_s, may_be_empty
        self._reports: dict[str, tuple[float, ReplicaStatus]] = {}
        self._left: dict[str, float] = {}
        self._awaited: frozenset[str] = frozenset()
        self._awaited_until = 0.0
        self.starts = Starts()
        """Those that failed; they stand here when their replicas have left the table."""

    def wait_for(self, replicas: frozenset[str]) -> None:
        """Of these, known from before, nothing is known now: until each has reported or must be dead, say nothing."""
        self._awaited, self._awaited_until = replicas, time.monotonic() + self._dead_after_s

    def is_complete(self) -> bool:
        """Whether every replica that may be live has reported."""
        return self._awaited <= self._reports.keys() or time.monotonic() >= self._awaited_until

    def report(self, status: ReplicaStatus) -> None:
        """Take in what a replica says of itself."""
        if status.replica_id in self._left:
            return  # overtaken by its goodbye
        known = self._reports.get(status.replica_id)
        if known is not None and known[1].sequence > status.sequence:
            return
        self.starts.saw(None if known is None else known[1], status)
        self._reports[status.replica_id] = (time.monotonic(), status)

    def leave(self, replica_id: str) -> None:
        """Take a replica out at once, because it ends."""
        now = time.monotonic()
        self._left = {i: at for i, at in self._left.items() if now - at < self._dead_after_s} | {replica_id: now}
        self._reports.pop(replica_id, None)
        self._awaited -= {replica_id}

    def live(self) -> tuple[ReplicaStatus, ...]:
        """The live replicas, with the age of their reports."""
        now = time.monotonic()
        self._awaited -= self._reports.keys()
        self._reports = {i: r for i, r in self._reports.items() if now - r[0] < self._dead_after_s}
        return tuple(
            status.model_copy(update={"age_s": round(now - at, 3)}) for _, (at, status) in sorted(self._reports.items())
        )

    def all_serve(self, version: int) -> bool:
        """Whether every replica that has served serves ``version`` or newer, and there is one if there must be."""
        versions = [status.version for status in self.live() if status.version is not None]
        served = all(known >= version for known in versions)
        return self.is_complete() and bool(versions or self._may_be_empty) and served

    def all_paused(self, paused: bool) -> bool:
        """Whether every replica that has served is paused (or not), and there is one if there must be."""
        states = [status.paused for status in self.live() if status.version is not None]
        obeyed = all(state == paused for state in states)
        return self.is_complete() and bool(states or self._may_be_empty) and obeyed

    def is_loading(self, replica_id: str, version: int) -> bool:
        """Whether a replica is live and on its way to a version."""
        return any(status.replica_id == replica_id and status.target == version for status in self.live())

    def in_use(self) -> set[int]:
        """Versions that a live replica serves or is loading: their files must stay."""
        return {v for status in self.live() for v in (status.version, status.target) if v is not None}
