"""The gateway's side of ``recent.py``: sends each rollout to the monitor in the background, without delaying it."""

import logging

from rollout_service.protocol.recent_rollout import RecentRollout
from rollout_service.protocol.rollout import Rollout
from rollout_service.runtime.background_sender import BackgroundSender
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
        self._sender: BackgroundSender[RecentRollout] = BackgroundSender(
            self._send,
            self._drop,
            sent=self._sent,
            room_tokens=QUEUE_TOKENS,
            batch_tokens=QUEUE_TOKENS,
            send_s=SEND_S,
        )
        self._failing = False
        self.others_wait_s = OTHERS_S if self._on and gateways > 1 else 0.0
        """Time in seconds that a report may have to wait for rollouts of other gateways."""
        self.dropped = 0
        """Number of rollouts that were not sent to the monitor."""

    def note(self, rollout: Rollout) -> None:
        """Queue a rollout; returns at once."""
        if self._on:
            self._sender.put(RecentRollout.of(rollout))

    async def flushed(self) -> None:
        """Return once all queued rollouts have been sent or dropped, or after a few seconds."""
        await self._sender.flushed(FLUSH_S)

    async def _send(self, batch: list[RecentRollout]) -> None:
        await self._monitor.remember(batch)

    def _sent(self) -> None:
        if self._failing:
            logger.warning("the monitor takes rollouts again; it missed %d so far", self.dropped)
        self._failing = False

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        if not self._failing:
            logger.warning("the monitor is not told of rollouts for now (%s): reports must bring their logprobs", why)
        self._failing = True
