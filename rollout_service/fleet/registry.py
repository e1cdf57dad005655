"""Table of live replicas, their versions, and checks if all have reached a state."""

import time
from collections.abc import Callable

from rollout_service.protocol.adapters import AdapterVersion, HeldAdapter
from rollout_service.protocol.fleet import FailedStart, FailedStarts, ReplicaStatus
from rollout_service.protocol.weight_log import Head


class FleetTable:
    """The last report of each replica. A replica leaves the table when it ends, or after ``dead_after_s`` without a
    report.

    A replica that has not served yet is in the table, but callers do not wait for it: it gets no request before it has
    the newest version.
    """

    def __init__(self, dead_after_s: float, may_be_empty: bool = False) -> None:
        """``may_be_empty``: True if no live replica is a valid state; otherwise one must be expected."""
        self._dead_after_s, self.may_be_empty = dead_after_s, may_be_empty
        self._reports: dict[str, tuple[float, ReplicaStatus]] = {}
        self._left: dict[str, float] = {}
        self._awaited: frozenset[str] = frozenset()
        self._awaited_until = 0.0
        self._newest: Head | None = None
        self._log: str | None = None
        self.failed_starts: FailedStarts | None = None
        """The last series of failed starts, kept after their replicas have left the table; None: no start has failed.

        A series ends when a replica serves its first version; the next failure begins another."""

    def wait_for(self, replicas: frozenset[str]) -> None:
        """After a restart, count no version as live until each of these replicas has reported or timed out."""
        self._awaited, self._awaited_until = replicas, time.monotonic() + self._dead_after_s

    def compare_with(self, newest: Head | None, log: str) -> None:
        """Set the version that replicas should serve, and its log: version numbers alone do not identify weights."""
        self._newest, self._log = newest, log

    def strangers(self) -> tuple[ReplicaStatus, ...]:
        """Return the live replicas that follow another log."""
        return tuple(status for status in self.live() if status.log not in (None, self._log))

    def is_complete(self) -> bool:
        """Return True if every replica that may be live has reported."""
        return self._awaited <= self._reports.keys() or time.monotonic() >= self._awaited_until

    def report(self, status: ReplicaStatus) -> None:
        """Process a replica's report."""
        if status.replica_id in self._left:
            return  # the report was overtaken by the replica's goodbye
        known = self._reports.get(status.replica_id)
        if known is not None and known[1].sequence > status.sequence:
            return
        self._note_start(None if known is None else known[1], status)
        self._reports[status.replica_id] = (time.monotonic(), status)

    def _note_start(self, before: ReplicaStatus | None, now: ReplicaStatus) -> None:
        series = self.failed_starts
        if now.version is not None:
            if series is not None and (before is None or before.version is None):  # it serves its first version
                self.failed_starts = series.model_copy(update={"over": True})
        elif now.state == "failed" and now.error is not None and (before is None or before.state != "failed"):
            start = FailedStart(replica_id=now.replica_id, reason=now.error, at=time.time())
            first, tries = (start, 1) if series is None or series.over else (series.first, series.tries + 1)
            self.failed_starts = FailedStarts(tries=tries, first=first, last=start, over=False)

    def leave(self, replica_id: str) -> None:
        """Remove a replica that ends."""
        now = time.monotonic()
        self._left = {i: at for i, at in self._left.items() if now - at < self._dead_after_s} | {replica_id: now}
        self._reports.pop(replica_id, None)
        self._awaited -= {replica_id}

    def live(self) -> tuple[ReplicaStatus, ...]:
        """Return the live replicas, with the age of their reports."""
        now = time.monotonic()
        self._awaited -= self._reports.keys()
        self._reports = {i: r for i, r in self._reports.items() if now - r[0] < self._dead_after_s}
        return tuple(
            status.model_copy(update={"age_s": round(now - at, 3)}) for _, (at, status) in sorted(self._reports.items())
        )

    def all_serve(self, version: int, digest: str | None = None) -> bool:
        """Return True if every replica that takes requests serves ``version`` or newer, and there is one if there must
        be.

        Draining replicas do not count, since they get no new requests, and neither do pinned ones. ``digest``: the
        digest of ``version`` in the log; None: only numbers are compared.
        """
        following = [status for status in self.live() if status.state != "draining" and status.group is None]
        serving = [status for status in following if status.version is not None]
        served = all(self._serves(status, Head(version=version, digest=digest or "")) for status in serving)
        return self.is_complete() and bool(serving or self.may_be_empty) and served

    def _serves(self, status: ReplicaStatus, wanted: Head) -> bool:
        if status.version is None or status.version < wanted.version or status.log not in (None, self._log):
            return False
        if status.digest is None or self._newest is None:
            return True
        for known in (wanted, self._newest):
            if status.version == known.version and known.digest:
                return status.digest == known.digest
        return status.version < self._newest.version

    def all_obey(self, order: str, asleep: bool = False) -> bool:
        """Return True if every replica that has served has completed that request, and there is one if there must be.

        ``asleep``: the request is to sleep, which a replica that starts also has to complete.
        """
        return self._all_have_served_and(lambda status: status.obeyed == order, also_starting=asleep)

    def all_aborted(self, number: int) -> bool:
        """Return True if every replica that has served has completed that abort or a later one."""
        return self._all_have_served_and(lambda status: status.aborted >= number)

    def _all_have_served_and(self, is_so: Callable[[ReplicaStatus], bool], also_starting: bool = False) -> bool:
        found = [
            is_so(status)
            for status in self.live()
            if status.version is not None or status.state == "asleep" or (also_starting and status.takes_memory)
        ]
        return self.is_complete() and bool(found or self.may_be_empty) and all(found)

    def adapter(self, adapter: AdapterVersion) -> dict[str, HeldAdapter | None]:
        """Return what each replica that takes requests reports of an adapter version; None: nothing yet."""
        return {
            status.replica_id: next((each for each in status.adapters if each.is_of(adapter)), None)
            for status in self.live()
            if status.state != "draining" and status.group is None and status.version is not None
        }

    def in_use(self) -> set[int]:
        """Return the versions that a live replica serves or is loading: their files must stay."""
        return {v for status in self.live() for v in (status.version, status.target) if v is not None}
