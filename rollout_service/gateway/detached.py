"""Detached rollouts: generated without a waiting client, and kept for a limited time."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from rollout_service.errors import NotFound, Overloaded, VersionConflict

Reply = dict[str, object]
KEPT_S = 3600.0
"""Seconds that a rollout is kept after its end, and again after each ``collect``."""
MOST_ROLLOUTS = 16384
"""Maximum number of rollouts that are running or kept."""
MOST_TOKENS = 1 << 26
"""Maximum number of tokens of prompts, completions and top logprobs, kept or requested. The replies take about 10 GB
with flat logprobs, and three times that in vLLM's format."""


@dataclass
class _Detached:
    making: asyncio.Task[Reply]
    tokens: int
    ended_at: float | None = None
    expiry: asyncio.TimerHandle | None = None
    """The timer that drops the rollout when it has expired."""


class DetachedRollouts:
    """The detached rollouts of one gateway, in memory."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        most: int = MOST_ROLLOUTS,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """Create the store. ``clock`` returns seconds."""
        self._clock, self._most, self._most_tokens = clock, most, most_tokens
        self._detached: dict[str, _Detached] = {}

    def begin(self, work: Coroutine[object, None, Reply], tokens: int, name: str | None = None) -> str:
        """Start ``work`` and return the id for ``collect``.

        Raises VersionConflict if the name is in use, Overloaded at a limit.

        Args:
            work: generates the rollout.
            tokens: maximum number of tokens that the reply may hold.
            name: the id. None: a new one.
        """
        try:
            self._require_place(tokens, name)
        except (Overloaded, VersionConflict):
            work.close()
            raise
        rollout_id = name or uuid.uuid4().hex
        detached = _Detached(asyncio.create_task(work, name=f"detached {rollout_id}"), tokens)
        self._detached[rollout_id] = detached
        detached.making.add_done_callback(lambda _: self._end(detached))
        return rollout_id

    def __len__(self) -> int:
        """Return the number of rollouts that are running or kept."""
        return len(self._detached)

    def forget_expired(self) -> None:
        """Drop expired rollouts. Called by a timer."""
        for rollout_id, each in list(self._detached.items()):
            if each.ended_at is not None and self._clock() - each.ended_at > KEPT_S:
                del self._detached[rollout_id]

    def _require_place(self, tokens: int, name: str | None) -> None:
        self.forget_expired()
        if name in self._detached:
            raise VersionConflict(
                f"there is a detached rollout {name} already: collect it at GET /v1/rollouts/{name}, or DELETE it"
            )
        held = sum(each.tokens for each in self._detached.values())
        if len(self._detached) >= self._most or held + tokens > self._most_tokens:
            raise Overloaded(
                f"{len(self._detached)} detached rollouts of up to {held} tokens are kept or under way, and at most "
                f"{self._most} of {self._most_tokens} may be: DELETE those that were collected",
                {
                    "rollouts": len(self._detached),
                    "tokens": held,
                    "limit": self._most,
                    "limit_tokens": self._most_tokens,
                },
            )

    def _end(self, detached: _Detached) -> None:
        self._keep_from_now(detached)
        if not detached.making.cancelled():
            detached.making.exception()  # marks the exception as retrieved, so that asyncio does not log it

    async def collect(self, rollout_id: str, wait_s: float) -> Reply | None:
        """Return the reply, or None if the rollout still runs after ``wait_s`` seconds. The reply stays available.

        Raises NotFound, or the error of the rollout.
        """
        self.forget_expired()
        detached = self._detached.get(rollout_id)
        if detached is None:
            raise NotFound(
                f"there is no detached rollout {rollout_id}: it was deleted, its time is over ({KEPT_S:g} s after its "
                "end), or the gateway that had it has ended: ask for it again"
            )
        await asyncio.wait([detached.making], timeout=wait_s)
        if not detached.making.done():
            return None
        if detached.making.cancelled():
            raise NotFound(f"the detached rollout {rollout_id} was deleted")
        self._keep_from_now(detached)
        return detached.making.result()

    def _keep_from_now(self, detached: _Detached) -> None:
        detached.ended_at = self._clock()
        if detached.expiry is not None:
            detached.expiry.cancel()
        detached.expiry = asyncio.get_running_loop().call_later(KEPT_S + 1, self.forget_expired)

    def delete(self, rollout_id: str) -> None:
        """Cancel a rollout if it is running, and drop it. An unknown id is ignored."""
        detached = self._detached.pop(rollout_id, None)
        if detached is not None:
            detached.making.cancel()
