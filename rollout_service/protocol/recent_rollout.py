"""Recent rollouts that gateways report to the monitor, so that a trainer's report needs only a request id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollout_service.protocol.rollout import Completion, Rollout

OVERHEAD_TOKENS = 256
"""Fixed cost in tokens of a rollout, and of each completion: about 1 KiB of objects around the arrays."""


@dataclass(frozen=True, slots=True)
class RecentCompletion:
    """Logprobs of a completion, and the spans of versions and replicas that sampled it."""

    logprobs: NDArray[np.float32]
    """[tokens]; engines compute them in fp32."""
    versions: NDArray[np.int64]
    """[spans]"""
    ends: NDArray[np.int32]
    """[spans], the index after each span's last token."""
    replicas: tuple[str, ...]
    """[spans]"""
    kv_from: NDArray[np.int64]
    """[spans], see ``Span.kv_from``; the span's version where it has none."""

    @classmethod
    def of(cls, completion: Completion, replica_id: str) -> RecentCompletion:
        """Copy the needed fields. ``replica_id``: the replica of spans without one."""
        return cls(
            np.asarray(completion.logprobs, np.float32),
            np.asarray([span.version for span in completion.spans], np.int64),
            np.asarray([span.end for span in completion.spans], np.int32),
            tuple(span.replica_id or replica_id for span in completion.spans),
            np.asarray([span.oldest_kv for span in completion.spans], np.int64),
        )


@dataclass(frozen=True, slots=True)
class RecentRollout:
    """One rollout by its request id."""

    request_id: str
    completions: dict[int, RecentCompletion]
    """Completions by index."""
    truncated_sampling: bool = False
    """The ``truncated_sampling`` of the rollout's reply."""

    @classmethod
    def of(cls, rollout: Rollout) -> RecentRollout:
        """Copy the needed fields."""
        completions = {c.index: RecentCompletion.of(c, rollout.replica_id) for c in rollout.completions}
        return cls(rollout.request_id, completions, rollout.truncated_sampling)

    @property
    def cost_tokens(self) -> int:
        """Return its size in tokens, counted against ``monitor.remember_tokens``."""
        return OVERHEAD_TOKENS + sum(len(c.logprobs) + OVERHEAD_TOKENS for c in self.completions.values())
