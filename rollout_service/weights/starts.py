"""Starts of engine replicas that failed: how many, and why the first one did."""

import time

from rollout_service.types import FailedStart, FailedStarts, ReplicaStatus


class Starts:
    """A series of failures ends when a replica serves its first version; the next failure begins another.

    The last series is kept, so that a service that recovered still says what was wrong.
    """

    def __init__(self) -> None:
        self._failed: dict[str, FailedStart] = {}
        self._over = False

    def saw(self, before: ReplicaStatus | None, now: ReplicaStatus) -> None:
        """Take in a replica's report. ``before``: its last one."""
        if now.version is not None:
            if before is None or before.version is None:  # it serves its first version
                self._over = True
        elif now.state == "failed" and now.error is not None and now.replica_id not in self._failed:
            if self._over:
                self._failed, self._over = {}, False
            self._failed[now.replica_id] = FailedStart(replica_id=now.replica_id, reason=now.error, at=time.time())

    def failed(self) -> FailedStarts | None:
        """The last series; None: every start went well."""
        if not self._failed:
            return None
        tries = list(self._failed.values())
        return FailedStarts(tries=len(tries), first=tries[0], last=tries[-1], over=self._over)
