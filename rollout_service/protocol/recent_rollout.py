"""What a gateway tells the monitor of a rollout, so that a trainer's report need name only its request id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollout_service.protocol.rollout import Completion, Rollout

OVERHEAD_TOKENS = 256
"""What a rollout, and each of its completions, counts beside its tokens: objects around the arrays, about 1 KiB."""


@dataclass(frozen=True, slots=True)
class RecentCompletion:
    """Its logprobs, and where its versions and replicas end."""

    logprobs: NDArray[np.float32]
    """[tokens]; engines compute them in fp32."""
    versions: NDArray[np.int64]
    """[spans]"""
    ends: NDArray[np.int32]
    """[spans], the token after each span's last."""
    replicas: tuple[str, ...]
    """[spans]"""

    @classmethod
    def of(cls, completion: Completion, replica_id: str) -> RecentCompletion:
        """Copy what is needed. ``replica_id``: of spans that name none."""
        return cls(
            np.asarray(completion.logprobs, np.float32),
            np.asarray([span.version for span in completion.spans], np.int64),
            np.asarray([span.end for span in completion.spans], np.int32),
            tuple(span.replica_id or replica_id for span in completion.spans),
        )


@dataclass(frozen=True, slots=True)
class RecentRollout:
    """One rollout by its request id."""

    request_id: str
    completions: dict[int, RecentCompletion]
    """By index."""
    truncated_sampling: bool = False
    """As in the rollout's reply."""

    @classmethod
    def of(cls, rollout: Rollout) -> RecentRollout:
        """Copy what is needed."""
        completions = {c.index: RecentCompletion.of(c, rollout.replica_id) for c in rollout.completions}
        return cls(rollout.request_id, completions, rollout.truncated_sampling)

    @property
    def cost_tokens(self) -> int:
        """What it counts of ``monitor.remember_tokens``."""
        return OVERHEAD_TOKENS + sum(len(c.logprobs) + OVERHEAD_TOKENS for c in self.completions.values())
