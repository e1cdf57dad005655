"""Recent rollouts in the monitor, so that a report needs only their request ids."""

from collections.abc import Iterable

from rollout_service.protocol.recent_rollout import RecentRollout


class RecentRollouts:
    """The newest rollouts up to ``limit_tokens``. A repeated request id replaces the older rollout."""

    def __init__(self, limit_tokens: int) -> None:
        self._limit_tokens = limit_tokens
        self._rollouts: dict[str, RecentRollout] = {}
        self._cost_tokens = 0

    def remember(self, rollouts: Iterable[RecentRollout]) -> None:
        """Add rollouts, and drop the oldest beyond the limit."""
        for rollout in rollouts:
            self._forget(rollout.request_id)
            self._rollouts[rollout.request_id] = rollout
            self._cost_tokens += rollout.cost_tokens
        while self._cost_tokens > self._limit_tokens:
            self._forget(next(iter(self._rollouts)))

    def get(self, request_id: str) -> RecentRollout | None:
        """Return the rollout, or None if it is not remembered (any more)."""
        return self._rollouts.get(request_id)

    def _forget(self, request_id: str) -> None:
        gone = self._rollouts.pop(request_id, None)
        if gone is not None:
            self._cost_tokens -= gone.cost_tokens
