"""A fixed share of the rollouts is scored, of those that the unquantized engine can be asked about."""

from typing import Any

import pytest

from rollout_service.protocol.rollout import Completion, Rollout, Span
from rollout_service.protocol.sampling import Sampling
from rollout_service.shadow.sample import calls_of, is_comparable, is_sampled
from tests.unit.monitor.reports import rollout

NAMES = [f"request-{i}" for i in range(20_000)]


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_share_is_kept(share: float) -> None:
    sampled = sum(is_sampled(name, share) for name in NAMES)
    assert abs(sampled / len(NAMES) - share) < 5 * (share * (1 - share) / len(NAMES)) ** 0.5


def test_none_and_all_are_exact() -> None:
    assert not any(is_sampled(name, 0.0) for name in NAMES)
    assert all(is_sampled(name, 1.0) for name in NAMES)


def test_a_larger_share_holds_the_smaller_one() -> None:
    assert {n for n in NAMES if is_sampled(n, 0.05)} < {n for n in NAMES if is_sampled(n, 0.1)}


@pytest.mark.parametrize(
    "changed",
    [
        {"logit_bias": {5: 1.0}},
        {"structured_outputs": {"regex": "[ab]+"}},
        {"temperature": 0.9},
        {"temperature": 0.0},
        {"top_p": 0.95},
        {"top_k": 50},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"min_tokens": 3},
    ],
)
def test_what_changes_the_distribution_cannot_be_compared(changed: dict[str, Any]) -> None:
    assert not is_comparable(Sampling(**changed))


@pytest.mark.parametrize("changed", [{}, {"top_k": -1}, {"n": 8, "max_tokens": 5, "seed": 1, "ignore_eos": True}])
def test_what_does_not_can(changed: dict[str, Any]) -> None:
    assert is_comparable(Sampling(**changed))


def test_each_completion_of_one_version_is_a_call() -> None:
    whole = rollout("a", [-1.0, -2.0], [], [-3.0], version=7)
    mixed = Completion(
        index=3,
        token_ids=(1, 2),
        logprobs=(-1.0, -1.0),
        finish_reason="length",
        spans=(Span(version=7, start=0, end=1), Span(version=8, start=1, end=2)),
    )
    calls = calls_of(Rollout(**{**dict(whole), "completions": (*whole.completions, mixed)}))
    assert [(call.version, call.logprobs) for call in calls] == [(7, (-1.0, -2.0)), (7, (-3.0,))]
    assert [call.cost_tokens for call in calls] == [3, 2]
    assert {call.replica_id for call in calls} == {whole.replica_id}
