"""The gateway's side of the shadow: sends a sample of rollouts in the background, without delaying them."""

import logging

from rollout_service.config import ShadowConfig
from rollout_service.metrics import table
from rollout_service.metrics.process import record
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.scoring import ScoreCall
from rollout_service.runtime.background_sender import FULL, BackgroundSender
from rollout_service.runtime.rpc import ShadowCalls
from rollout_service.shadow.sample import calls_of, is_comparable, is_sampled

logger = logging.getLogger(__name__)
BATCH_TOKENS = 1 << 15
"""Maximum tokens of a batch; a single completion may be longer. The next batch is sent when it is scored."""
SCORE_S = 600.0
"""Timeout in seconds for a batch."""


class ShadowFeed:
    """Sends a batch whenever the previous one is scored."""

    def __init__(self, shadow: ShadowCalls | None, config: ShadowConfig) -> None:
        """``shadow``: None disables sending."""
        self._shadow, self._share = shadow, config.share
        self._sender: BackgroundSender[ScoreCall] = BackgroundSender(
            self._send,
            self._drop,
            sent=self._sent,
            queued=lambda tokens: record(table.SHADOW_QUEUE, tokens),
            room_tokens=config.max_queue_tokens,
            batch_tokens=BATCH_TOKENS,
            send_s=SCORE_S,
        )
        self._failing = False

    def note(self, rollout: Rollout, sampling: Sampling) -> None:
        """Queue a rollout if it is in the sample; returns at once."""
        if self._shadow is None or not is_sampled(rollout.request_id, self._share):
            return
        if not is_comparable(sampling):
            outcome = "truncated" if sampling.is_truncated else "sampling"
            record(table.SHADOW_COMPLETIONS, len(rollout.completions), outcome=outcome)
            return
        mixed = sum(len(completion.spans) > 1 for completion in rollout.completions)
        record(table.SHADOW_COMPLETIONS, mixed, outcome="mixed")
        for call in calls_of(rollout):
            self._sender.put(call)

    async def _send(self, batch: list[ScoreCall]) -> None:
        assert self._shadow is not None, "nothing is queued without one"
        await self._shadow.score(batch)

    def _sent(self) -> None:
        self._failing = False

    def _drop(self, count: int, why: str) -> None:
        record(table.SHADOW_COMPLETIONS, count, outcome="full" if why == FULL else "lost")
        if not self._failing:
            logger.warning("rollouts are not scored by the shadow for now: %s", why)
        self._failing = True
