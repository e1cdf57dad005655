"""The gateway's side: sends a sample of rollouts to the shadow, and never lets a rollout wait for that."""

import asyncio
import contextvars
import logging
from collections import deque
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException

from rollout_service.config import ShadowConfig
from rollout_service.metrics import table
from rollout_service.metrics.process import record
from rollout_service.sampling import Sampling
from rollout_service.shadow.sample import ScoreCall, calls_of, is_comparable, is_sampled
from rollout_service.types import Rollout

logger = logging.getLogger(__name__)
BATCH_TOKENS = 1 << 15
"""Sent at once, unless a single completion is longer; the next batch goes when it is scored."""
SCORE_S = 600.0
"""Longest wait for a batch."""


class ShadowFeed:
    """A bounded queue, and one task that empties it."""

    def __init__(self, shadow: Any, config: ShadowConfig) -> None:
        """``shadow``: handle of the deployment, or None: nothing is ever sent."""
        self._shadow, self._config = shadow, config
        self._queue: deque[ScoreCall] = deque()
        self._queued_tokens = 0
        self._sender: asyncio.Task[None] | None = None
        self._failing = False

    def note(self, rollout: Rollout, sampling: Sampling) -> None:
        """Queue a rollout if it is sampled; returns at once."""
        if self._shadow is None or not is_sampled(rollout.request_id, self._config.share):
            return
        if not is_comparable(sampling):
            record(table.SHADOW_COMPLETIONS, len(rollout.completions), outcome="sampling")
            return
        calls = calls_of(rollout)
        record(table.SHADOW_COMPLETIONS, len(rollout.completions) - len(calls), outcome="mixed")
        for call in calls:
            self._queue_up(call)

    def _queue_up(self, call: ScoreCall) -> None:
        if self._queued_tokens + call.cost_tokens > self._config.max_queue_tokens:
            self._drop(1, "full", "its queue is full")
            return
        self._queue.append(call)
        self._count(call.cost_tokens)
        if self._sender is None or self._sender.done():
            # not in the request's context: Serve cancels with a request what was called in it
            self._sender = asyncio.get_running_loop().create_task(self._send(), context=contextvars.Context())

    async def _send(self) -> None:
        while self._queue:
            batch = self._batch()
            try:
                async with asyncio.timeout(SCORE_S):
                    await self._shadow.score.remote(batch)
            except (RayActorError, RayTaskError, RayServeException, TimeoutError) as error:
                self._drop(len(batch), "lost", repr(error))
            else:
                self._failing = False

    def _batch(self) -> list[ScoreCall]:
        batch = [self._queue.popleft()]
        tokens = batch[0].cost_tokens
        while self._queue and tokens + self._queue[0].cost_tokens <= BATCH_TOKENS:
            batch.append(self._queue.popleft())
            tokens += batch[-1].cost_tokens
        self._count(-tokens)
        return batch

    def _count(self, tokens: int) -> None:
        self._queued_tokens += tokens
        record(table.SHADOW_QUEUE, self._queued_tokens)

    def _drop(self, count: int, outcome: str, why: str) -> None:
        record(table.SHADOW_COMPLETIONS, count, outcome=outcome)
        if not self._failing:
            logger.warning("rollouts are not scored by the shadow for now: %s", why)
        self._failing = True
