"""The gateway's side of ``recent.py``: tells the monitor of each rollout, and never lets a rollout wait for that."""

import logging

from rollout_service.protocol.recent_rollout import RecentRollout
from rollout_service.protocol.rollout import Rollout
from rollout_service.runtime.background_sender import BackgroundSender
from rollout_service.runtime.rpc import MonitorCalls

logger = logging.getLogger(__name__)
QUEUE_TOKENS = 1 << 20
"""Room for rollouts that the monitor has not taken yet; beyond it the new ones are dropped."""
SEND_S = 10.0
"""Longest wait for the monitor to take a batch."""
FLUSH_S = 5.0
OTHERS_S = 2.0
"""How long the monitor waits for what other gateways are about to tell it; they tell at once."""


class RolloutFeed:
    """Sends what is there at once."""

    def __init__(self, monitor: MonitorCalls, remember_tokens: int, gateways: int = 1) -> None:
        """``remember_tokens`` 0: nothing is ever sent. ``gateways``: in all."""
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
        """How long a report that names rollouts may have to wait for those that other gateways answered."""
        self.dropped = 0
        """Rollouts that the monitor was not told of."""

    def note(self, rollout: Rollout) -> None:
        """Queue a rollout; returns at once."""
        if self._on:
            self._sender.put(RecentRollout.of(rollout))

    async def flushed(self) -> None:
        """Return once what was noted before has been sent or dropped, or after a few seconds."""
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
