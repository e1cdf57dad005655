"""The table of replicas: who is live, what each serves, and the state that all of them should reach."""

import time
from collections.abc import Callable

from rollout_service.fleet.failed_starts import FailedStartLog
from rollout_service.protocol.fleet import ReplicaStatus
from rollout_service.protocol.weight_log import Head


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
        self._newest: Head | None = None
        self._log: str | None = None
        self.starts = FailedStartLog()
        """Those that failed; they stand here when their replicas have left the table."""

    def wait_for(self, replicas: frozenset[str]) -> None:
        """After a restart: no version counts as live until each of these replicas has reported or timed out."""
        self._awaited, self._awaited_until = replicas, time.monotonic() + self._dead_after_s

    def compare_with(self, newest: Head | None, log: str) -> None:
        """What replicas should serve by now, and the log that it is in: numbers alone do not say what they serve."""
        self._newest, self._log = newest, log

    def strangers(self) -> tuple[ReplicaStatus, ...]:
        """Live replicas that follow another log."""
        return tuple(status for status in self.live() if status.log not in (None, self._log))

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

    def all_serve(self, version: int, digest: str | None = None) -> bool:
        """Whether every replica that takes requests serves ``version`` or newer, and there is one if there must be.

        One that drains is not waited for: nobody asks it for anything any more. ``digest``: what the log says of
        ``version``; None: its number is enough.
        """
        serving = [status for status in self.live() if status.state != "draining" and status.version is not None]
        served = all(self._serves(status, Head(version=version, digest=digest or "")) for status in serving)
        return self.is_complete() and bool(serving or self._may_be_empty) and served

    def _serves(self, status: ReplicaStatus, wanted: Head) -> bool:
        if status.version is None or status.version < wanted.version or status.log not in (None, self._log):
            return False
        if status.digest is None or self._newest is None:
            return True
        for known in (wanted, self._newest):
            if status.version == known.version and known.digest:
                return status.digest == known.digest
        return status.version < self._newest.version

    def all_obey(self, order: str) -> bool:
        """Whether every replica that has served is as was last asked, and there is one if there must be."""
        return self._all_have_served_and(lambda status: status.obeyed == order)

    def all_aborted(self, number: int) -> bool:
        """Return True if every replica that has served has obeyed that abort or a later one."""
        return self._all_have_served_and(lambda status: status.aborted >= number)

    def _all_have_served_and(self, is_so: Callable[[ReplicaStatus], bool]) -> bool:
        found = [is_so(status) for status in self.live() if status.version is not None or status.state == "asleep"]
        return self.is_complete() and bool(found or self._may_be_empty) and all(found)

    def is_loading(self, replica_id: str, version: int) -> bool:
        """Whether a replica is live and on its way to a version."""
        return any(status.replica_id == replica_id and status.target == version for status in self.live())

    def in_use(self) -> set[int]:
        """Versions that a live replica serves or is loading: their files must stay."""
        return {v for status in self.live() for v in (status.version, status.target) if v is not None}
