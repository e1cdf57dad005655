"""Rollouts that nobody waits for: they are made, and kept until they are collected, for a while."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from rollout_service.errors import NotFound, Overloaded, VersionConflict

Reply = dict[str, object]
KEPT_S = 3600.0
"""After its end, and again after it was last collected."""
MOST_ROLLOUTS = 16384
"""Under way or kept."""
MOST_TOKENS = 1 << 26
"""Of prompts and completions, and candidates beside them, kept or asked for: about 10 GB of replies with flat logprobs,
and three times that with logprobs in vLLM's form."""


@dataclass
class _Detached:
    making: asyncio.Task[Reply]
    tokens: int
    ended_at: float | None = None
    expiry: asyncio.TimerHandle | None = None
    """Looks whether its time is over."""


class DetachedRollouts:
    """Of one gateway, in its memory."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        most: int = MOST_ROLLOUTS,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """``clock``: in seconds."""
        self._clock, self._most, self._most_tokens = clock, most, most_tokens
        self._detached: dict[str, _Detached] = {}

    def begin(self, work: Coroutine[object, None, Reply], tokens: int, name: str | None = None) -> str:
        """Have ``work`` done; the id by which it is collected. ``tokens``: the most that its reply may hold.

        Raises VersionConflict if there is one of that name, Overloaded if there are too many.
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
        """Under way or kept."""
        return len(self._detached)

    def forget_expired(self) -> None:
        """Those whose time is over. Is called by itself."""
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
            detached.making.exception()  # else asyncio complains of one that nobody collects

    async def collect(self, rollout_id: str, wait_s: float) -> Reply | None:
        """Its reply; None: it is still made after ``wait_s`` seconds. It is kept for whoever asks again.

        Raises NotFound, and what the rollout raised.
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
        """End it, if it is under way, and forget it. One that is not there is deleted already."""
        detached = self._detached.pop(rollout_id, None)
        if detached is not None:
            detached.making.cancel()
