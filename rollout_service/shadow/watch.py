"""Stands before a ``WeightSync`` where the ingest would: wakes it for new versions, and keeps its reports to itself."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rollout_service.fleet.registry import DesiredState
from rollout_service.protocol.fleet import ReplicaStatus
from rollout_service.store.log import WeightLog

LOOK_S = 0.2
"""Between two looks at the log."""


@dataclass(frozen=True)
class _Method:
    """``method.remote(...)`` as on a handle."""

    remote: Callable[..., Awaitable[Any]]


class LogWatch:
    """The shadow is no replica of the fleet: nobody waits for it, it is in no table, and no pause is meant for it."""

    def __init__(self, log: WeightLog, poll_s: float) -> None:
        """``poll_s``: longest time until ``sync`` answers."""
        self._log, self._poll_s = log, poll_s
        self.sync, self.report = _Method(self._sync), _Method(self._report)

    async def _sync(self, status: ReplicaStatus, seen: DesiredState | None) -> DesiredState:
        until = time.monotonic() + self._poll_s
        while True:
            head = self._log.head()
            version, digest = (-1, None) if head is None else (head.version, head.digest)
            wish = DesiredState(version=version, paused=False, pause_mode="keep", digest=digest)
            if wish != seen or time.monotonic() > until:
                return wish
            await asyncio.sleep(LOOK_S)

    async def _report(self, status: ReplicaStatus) -> None:
        pass
