"""The gateway's side of ``recent.py``: sends each rollout to the monitor in the background, without delaying it."""

import asyncio
import contextvars
import logging

from rollout_service.errors import RolloutServiceError
from rollout_service.protocol.recent_rollout import RecentRollout
from rollout_service.protocol.rollout import Rollout
from rollout_service.runtime.rpc import MonitorCalls

logger = logging.getLogger(__name__)
QUEUE_TOKENS = 1 << 20
"""Maximum size of queued rollouts in tokens; further ones are dropped."""
SEND_S = 10.0
"""Timeout in seconds for sending a batch to the monitor."""
FLUSH_S = 5.0
OTHERS_S = 2.0
"""Time in seconds that the monitor waits for other gateways, which send rollouts at once."""


class RolloutFeed:
    """Sends rollouts to the monitor, all waiting ones at once."""

    def __init__(self, monitor: MonitorCalls, remember_tokens: int, gateways: int = 1) -> None:
        """``remember_tokens``: 0 disables sending. ``gateways``: number of all gateways."""
        self._monitor, self._on = monitor, remember_tokens > 0
        self._queue: list[RecentRollout] = []
        self._queued_tokens = 0
        self._sender: asyncio.Task[None] | None = None
        self._failing = False
        self.others_wait_s = OTHERS_S if self._on and gateways > 1 else 0.0
        """Time in seconds that a report may have to wait for rollouts of other gateways."""
        self.dropped = 0
        """Number of rollouts that were not sent to the monitor."""

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
            # not in the request's context: Serve cancels calls made in a request's context along with it
            self._sender = asyncio.get_running_loop().create_task(self._empty(), context=contextvars.Context())

    async def wait_until_sent(self) -> None:
        """Return once all queued rollouts have been sent or dropped, or after a few seconds."""
        if self._sender is not None and not self._sender.done():
            await asyncio.wait([self._sender], timeout=FLUSH_S)

    async def _empty(self) -> None:
        while self._queue:
            batch, self._queue, self._queued_tokens = self._queue, [], 0
            try:
                async with asyncio.timeout(SEND_S):
                    await self._monitor.remember(batch)
            except (RolloutServiceError, TimeoutError) as error:
                self._drop(len(batch), repr(error))
            else:
                self._note_sent()

    def _note_sent(self) -> None:
        if self._failing:
            logger.warning("the monitor takes rollouts again; it missed %d so far", self.dropped)
        self._failing = False

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        if not self._failing:
            logger.warning("the monitor is not told of rollouts for now (%s): reports must bring their logprobs", why)
        self._failing = True
