"""Stands before a ``WeightSync`` where the ingest would: wakes it for new versions, and keeps its reports to itself."""

import asyncio
import time

from rollout_service.protocol.fleet import ReplicaStatus
from rollout_service.protocol.weight_log import DesiredState
from rollout_service.store.log import WeightLog

LOOK_S = 0.2
"""Between two looks at the log."""


class LogWatch:
    """The shadow is no replica of the fleet: nobody waits for it, it is in no table, and no pause is meant for it."""

    def __init__(self, log: WeightLog, poll_s: float) -> None:
        """``poll_s``: longest time until ``sync`` answers."""
        self._log, self._poll_s = log, poll_s

    async def sync(self, status: ReplicaStatus, seen: DesiredState | None) -> DesiredState:
        """The newest version in the log, once it is another than ``seen`` or after ``poll_s``; never a pause."""
        until = time.monotonic() + self._poll_s
        while True:
            head = self._log.head()
            version, digest = (-1, None) if head is None else (head.version, head.digest)
            desired = DesiredState(version=version, paused=False, pause_mode="keep", digest=digest)
            if desired != seen or time.monotonic() > until:
                return desired
            await asyncio.sleep(LOOK_S)

    async def report(self, status: ReplicaStatus) -> None:
        """Kept to itself."""

    async def goodbye(self, replica_id: str) -> None:
        """There is nobody to tell."""
