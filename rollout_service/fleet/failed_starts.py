"""Failed starts of engine replicas: their number, and the error of the first one."""

import time

from rollout_service.protocol.fleet import FailedStart, FailedStarts, ReplicaStatus


class FailedStartLog:
    """A series of failed starts. It ends when a replica serves its first version; the next failure begins another.

    The last series is kept, so that its reason is known after the service has recovered.
    """

    def __init__(self) -> None:
        self._failed: FailedStarts | None = None

    def saw(self, before: ReplicaStatus | None, now: ReplicaStatus) -> None:
        """Process a replica's report. ``before``: its previous one."""
        if now.version is not None:
            if self._failed is not None and (before is None or before.version is None):  # it serves its first version
                self._failed = self._failed.model_copy(update={"over": True})
        elif now.state == "failed" and now.error is not None and (before is None or before.state != "failed"):
            start = FailedStart(replica_id=now.replica_id, reason=now.error, at=time.time())
            known = None if self._failed is None or self._failed.over else self._failed
            first, tries = (start, 1) if known is None else (known.first, known.tries + 1)
            self._failed = FailedStarts(tries=tries, first=first, last=start, over=False)

    def failed(self) -> FailedStarts | None:
        """Return the last series; None: no start has failed."""
        return self._failed
