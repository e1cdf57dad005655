"""Whether the model that tells which versions wrote its cache is read correctly."""

import math

import pytest

from rollout_service.protocol.rollout import Candidate, Completion, Span
from tests.support.telltale import CANDIDATES, assert_bounded, token_of

NONE = 100
"""The first token of no version."""


def completion(version: int, kv_from: int | None, *shares: tuple[int, float]) -> Completion:
    """A completion of one token, with the versions in its cache, and the excess of each one's logit."""
    told = [(token_of(each), excess) for each, excess in ((version, 7.0), *shares)]
    logits = [*told, *((NONE + at, 0.0) for at in range(CANDIDATES - len(told)))]
    total = math.log(sum(math.exp(logit) for _, logit in logits))
    candidates = tuple(Candidate(token, logit - total, rank) for rank, (token, logit) in enumerate(logits, 1))
    return Completion(
        index=0,
        token_ids=(token_of(version),),
        logprobs=(candidates[0].logprob,),
        finish_reason="length",
        spans=(Span(version=version, start=0, end=1, kv_from=kv_from),),
        top_logprobs=(candidates,),
    )


def test_tokens_that_read_older_versions_are_counted():
    assert assert_bounded(completion(50, None), 2) == 0
    assert assert_bounded(completion(50, 48, (48, 0.01)), 2) == 1
    assert assert_bounded(completion(50, 48), 2) == 0  # a bound


@pytest.mark.parametrize(
    ("kv_from", "wrote", "max_age"), [(None, 49, 2), (49, 48, 2), (47, 47, 2), (48, 40, 2), (48, 49, 1)]
)
def test_cache_older_than_the_span_or_the_bound_fails(kv_from, wrote, max_age):
    with pytest.raises(AssertionError, match="cache of ages"):
        assert_bounded(completion(50, kv_from, (wrote, 0.01)), max_age)
