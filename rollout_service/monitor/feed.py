"""The gateway's side of ``recent.py``: tells the monitor of each rollout, and never lets a rollout wait for that."""

import asyncio
import contextvars
import logging
from collections import deque
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException

from rollout_service.monitor.recent import RecentRollout
from rollout_service.types import Rollout

logger = logging.getLogger(__name__)
QUEUE_TOKENS = 1 << 20
"""Room for rollouts that the monitor has not taken yet; beyond it the new ones are dropped."""
SEND_S = 10.0
"""Longest wait for the monitor to take a batch."""
FLUSH_S = 5.0


class RolloutFeed:
    """A bounded queue, and one task that empties it."""

    def __init__(self, monitor: Any, remember_tokens: int) -> None:
        """``monitor``: handle of the deployment. ``remember_tokens`` 0: nothing is ever sent."""
        self._monitor, self._on = monitor, remember_tokens > 0
        self._queue: deque[RecentRollout] = deque()
        self._queued_tokens = 0
        self._sender: asyncio.Task[None] | None = None
        self._failing = False
        self.dropped = 0
        """Rollouts that the monitor was not told of."""

    def note(self, rollout: Rollout) -> None:
        """Queue a rollout; returns at once."""
        if not self._on:
            return
        recent = RecentRollout.of(rollout)
        if self._queued_tokens + recent.cost_tokens > QUEUE_TOKENS:
            self._drop(1, "its queue is full")
            return
        self._queue.append(recent)
        self._queued_tokens += recent.cost_tokens
        if self._sender is None or self._sender.done():
            # not in the request's context: Serve cancels with a request what was called in it
            self._sender = asyncio.get_running_loop().create_task(self._send(), context=contextvars.Context())

    async def flushed(self) -> None:
        """Return once what was noted before has been sent or dropped, or after a few seconds."""
        if self._sender is not None and not self._sender.done():
            await asyncio.wait([self._sender], timeout=FLUSH_S)

    async def _send(self) -> None:
        while self._queue:
            batch, self._queue, self._queued_tokens = list(self._queue), deque(), 0
            try:
                async with asyncio.timeout(SEND_S):
                    await self._monitor.remember.remote(batch)
            except (RayActorError, RayTaskError, RayServeException, TimeoutError) as error:
                self._drop(len(batch), repr(error))
            else:
                if self._failing:
                    logger.warning("the monitor takes rollouts again; it missed %d so far", self.dropped)
                self._failing = False

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        if not self._failing:
            logger.warning("the monitor is not told of rollouts for now (%s): reports must bring their logprobs", why)
        self._failing = True
