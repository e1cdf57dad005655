"""When a replica must not be counted on any more, and what becomes of the completions that run in it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from rollout_service.engine.admission import AdmissionLimit
from rollout_service.fleet.routing import STATS_PERIOD_S
from rollout_service.runtime.drain import Drain

UNASKED_AFTER_S = 10 * STATS_PERIOD_S
"""Serve asks replicas for their health and their routing stats every period, and tells none that it removes it."""
_POLL_S = 0.25


class Aborts(Protocol):
    """What is needed of the engine adapter."""

    async def abort(self) -> None: ...


class HandOver:
    """Of one replica: its drain, and whether anybody asks it for anything."""

    def __init__(
        self,
        drain: Drain,
        admission: AdmissionLimit,
        others_serve: Callable[[], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``others_serve``: whether another replica takes requests. ``clock``, ``sleep``: in seconds."""
        self._drain, self._admission = drain, admission
        self._others_serve, self._clock, self._sleep = others_serve, clock, sleep
        self._asked_at: float | None = None

    def asked(self) -> None:
        """Serve, or a caller, has just asked this replica for something."""
        self._asked_at = self._clock()

    @property
    def draining(self) -> bool:
        """Whether this replica was told to end, or nobody has asked it for anything for ``UNASKED_AFTER_S``."""
        return self._drain.begun or self._unasked_s > UNASKED_AFTER_S

    @property
    def _unasked_s(self) -> float:
        return 0.0 if self._asked_at is None else self._clock() - self._asked_at

    async def hand_over(self, engine: Aborts) -> None:
        """The work of a drain: let what runs end while others serve, then give it back as it is, to go on elsewhere.

        Without another replica it is given back at once: its tokens are kept in the gateway, and the successor, which
        may need this one's resources, starts the sooner.
        """
        while self._admission.running and self._drain.left_s and await self._others_serve():
            await self._sleep(_POLL_S)
        while self._admission.running:  # again: a call may have been on its way into the engine
            await engine.abort()
            await self._sleep(_POLL_S)

    async def watch(self, engine: Aborts) -> None:
        """Without end: give back what runs in time when Serve removes this replica, of which it is not told."""
        while True:
            await self._sleep(STATS_PERIOD_S)
            if self._admission.running and self._unasked_s > self._drain.work_s:
                await engine.abort()
