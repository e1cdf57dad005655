"""Hand over running completions when a replica is draining or removed."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from rollout_service.compat import ray_internals
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.admission import AdmissionLimit
from rollout_service.fleet.routing import STATS_PERIOD_S
from rollout_service.runtime.drain import Drain

UNASKED_AFTER_S = 10 * STATS_PERIOD_S
"""Seconds without a call after which the replica counts as removed. Serve asks for health and routing stats every
period, but does not announce a removal."""
_POLL_S = 0.25


class HandOver:
    """The state of one replica's removal: its drain, and the time of its last call."""

    def __init__(
        self,
        drain: Drain,
        admission: AdmissionLimit,
        others_serve: Callable[[], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        controller_answered: Callable[[float], Awaitable[bool]] = ray_internals.controller_answered,
    ) -> None:
        """Create the state.

        Args:
            drain, admission: this replica's drain and its running sequences.
            others_serve: returns True if another replica accepts requests.
            clock, sleep: the time source, in seconds.
            controller_answered: returns True if Serve's controller answers within the given seconds.
        """
        self._drain, self._admission = drain, admission
        self._others_serve, self._clock, self._sleep = others_serve, clock, sleep
        self._controller_answered = controller_answered
        self._asked_at: float | None = None

    def asked(self) -> None:
        """Record a call from Serve or a client."""
        self._asked_at = self._clock()

    @property
    def draining(self) -> bool:
        """True if this replica was told to end, or got no call for ``UNASKED_AFTER_S`` seconds."""
        return self._drain.begun or self._unasked_s > UNASKED_AFTER_S

    @property
    def _unasked_s(self) -> float:
        return 0.0 if self._asked_at is None else self._clock() - self._asked_at

    async def hand_over(self, engine: EngineAdapter) -> None:
        """Drain: let running calls finish while other replicas serve, then abort them so that others continue them.

        Without another replica the calls are aborted at once. The gateway keeps their tokens, and the successor starts
        sooner, which may need this replica's resources.
        """
        while self._admission.running and self._drain.left_s and await self._others_serve():
            await self._sleep(_POLL_S)
        while self._admission.running:  # repeated, because a call may still be on its way into the engine
            await engine.abort()
            await self._sleep(_POLL_S)

    async def watch(self, engine: EngineAdapter) -> None:
        """Run forever: abort running calls in time if Serve has removed this replica without notice. Serve removes none
        while its controller is away."""
        while True:
            await self._sleep(STATS_PERIOD_S)
            if self._unasked_s < 2 * STATS_PERIOD_S:
                continue
            if not await self._controller_answered(ray_internals.ANSWERS_S):
                self.asked()  # a restarted controller has yet to find its replicas
            elif self._admission.running and self._unasked_s > self._drain.work_s:
                await engine.abort()
