"""Starts of engine replicas that failed: how many, and why the first one did."""

import time

from rollout_service.protocol.fleet import FailedStart, FailedStarts, ReplicaStatus


class FailedStartLog:
    """A series of failures ends when a replica serves its first version; the next failure begins another.

    The last series is kept, so that a service that recovered still says what was wrong.
    """

    def __init__(self) -> None:
        self._failed: FailedStarts | None = None

    def saw(self, before: ReplicaStatus | None, now: ReplicaStatus) -> None:
        """Take in a replica's report. ``before``: its last one."""
        if now.version is not None:
            if self._failed is not None and (before is None or before.version is None):  # it serves its first version
                self._failed = self._failed.model_copy(update={"over": True})
        elif now.state == "failed" and now.error is not None and (before is None or before.state != "failed"):
            start = FailedStart(replica_id=now.replica_id, reason=now.error, at=time.time())
            known = None if self._failed is None or self._failed.over else self._failed
            first, tries = (start, 1) if known is None else (known.first, known.tries + 1)
            self._failed = FailedStarts(tries=tries, first=first, last=start, over=False)

    def failed(self) -> FailedStarts | None:
        """The last series; None: every start went well."""
        return self._failed
