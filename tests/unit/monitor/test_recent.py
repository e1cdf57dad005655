"""Recent rollouts by their request ids, within their bound."""

import numpy as np

from rollout_service.monitor.recent import RecentRollouts
from rollout_service.protocol.recent_rollout import OVERHEAD_TOKENS, RecentRollout
from rollout_service.protocol.rollout import Completion, Rollout, Span


def rollout(request_id: str, tokens: int = 3, replica_id: str = "r1") -> RecentRollout:
    spans = (Span(version=4, start=0, end=1), Span(version=5, start=1, end=tokens)) if tokens > 1 else ()
    logprobs = tuple(-0.25 * i for i in range(tokens if spans else 0))
    completion = Completion(
        index=0, token_ids=tuple(range(len(logprobs))), logprobs=logprobs, finish_reason="stop", spans=spans
    )
    return RecentRollout.of(
        Rollout(request_id=request_id, prompt_token_ids=(1,), completions=(completion,), replica_id=replica_id)
    )


def test_what_is_kept_of_a_rollout_is_compact() -> None:
    kept = rollout("a").completions[0]
    assert kept.logprobs.dtype == np.float32 and kept.logprobs.tolist() == [0.0, -0.25, -0.5]
    assert kept.versions.tolist() == [4, 5] and kept.ends.tolist() == [1, 3]


def test_the_oldest_are_forgotten_first() -> None:
    each = rollout("a").cost_tokens
    recent = RecentRollouts(2 * each)
    recent.remember([rollout("a"), rollout("b")])
    recent.remember([rollout("c")])
    assert recent.get("a") is None
    assert recent.get("b") is not None and recent.get("c") is not None


def test_an_id_that_comes_again_means_the_newer_rollout() -> None:
    each = rollout("a").cost_tokens
    recent = RecentRollouts(2 * each)
    recent.remember([rollout("a", replica_id="old"), rollout("b"), rollout("a", replica_id="new")])
    found = recent.get("a")
    assert found is not None and found.completions[0].replicas == ("new", "new")
    recent.remember([rollout("c")])
    assert recent.get("b") is None and recent.get("a") is not None


def test_rollouts_without_tokens_have_a_cost_too() -> None:
    recent = RecentRollouts(100 * OVERHEAD_TOKENS)
    recent.remember(rollout(f"empty-{i}", tokens=0) for i in range(10_000))
    assert sum(recent.get(f"empty-{i}") is not None for i in range(10_000)) == 50


def test_a_rollout_larger_than_the_bound_is_not_kept() -> None:
    recent = RecentRollouts(1000)
    recent.remember([rollout("a", tokens=1000)])
    assert recent.get("a") is None
