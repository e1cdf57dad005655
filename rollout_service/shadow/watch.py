"""Replacement for the ingest in the shadow's ``WeightSync``: wakes it for new versions, and drops its reports."""

import asyncio
import time

from rollout_service.protocol.fleet import ReplicaStatus
from rollout_service.protocol.weight_log import DesiredState
from rollout_service.store.log import WeightLog

LOOK_S = 0.2
"""Time in seconds between two reads of the log."""


class LogWatch:
    """Watches the log for the shadow, which is not a replica of the fleet: it is in no table, and pauses do not apply
    to it."""

    def __init__(self, log: WeightLog, poll_s: float) -> None:
        """``poll_s``: maximum time in seconds until ``sync`` answers."""
        self._log, self._poll_s = log, poll_s

    async def sync(self, status: ReplicaStatus, seen: DesiredState | None) -> DesiredState:
        """Return the newest version in the log, once it differs from ``seen`` or after ``poll_s``; never a pause."""
        until = time.monotonic() + self._poll_s
        while True:
            head = self._log.head()
            version, digest = (-1, None) if head is None else (head.version, head.digest)
            desired = DesiredState(version=version, paused=False, pause_mode="keep", digest=digest)
            if desired != seen or time.monotonic() > until:
                return desired
            await asyncio.sleep(LOOK_S)

    async def report(self, status: ReplicaStatus) -> None:
        """Ignore the report."""

    async def goodbye(self, replica_id: str) -> None:
        """Do nothing."""
