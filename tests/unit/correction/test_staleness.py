"""Versions of tokens, lag and the filter, against plain Python."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import fresh_tokens, token_lag, token_versions
from rollout_service.protocol.rollout import Span


def spans_of(versions: list[int]) -> list[Span]:
    """One span for each token: neighbours of one version need not be joined."""
    return [Span(version=version, start=at, end=at + 1) for at, version in enumerate(versions)]


ROWS = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4)


@given(rows=ROWS, ahead=st.integers(0, 3), max_lag=st.integers(0, 10))
def test_versions_lag_and_filter_follow_the_spans(rows, ahead, max_lag):
    trainer = 9 + ahead
    versions = token_versions([spans_of(row) for row in rows])
    width = max(map(len, rows))
    assert versions.tolist() == [row + [-1] * (width - len(row)) for row in rows]
    assert token_lag(versions, trainer).tolist() == [
        [trainer - v for v in row] + [0] * (width - len(row)) for row in rows
    ]
    by_token = [[trainer - v <= max_lag for v in row] for row in rows]
    padding = [[False] * (width - len(row)) for row in rows]
    tokens = fresh_tokens(versions, trainer, max_lag, "token").tolist()
    assert tokens == [row + pad for row, pad in zip(by_token, padding, strict=True)]
    sequences = fresh_tokens(versions, trainer, max_lag).tolist()
    assert sequences == [[all(row)] * len(row) + pad for row, pad in zip(by_token, padding, strict=True)]


def test_a_completion_that_an_update_split():
    spans = [[Span(version=3, start=0, end=2), Span(version=5, start=2, end=3)], [Span(version=5, start=0, end=1)]]
    versions = token_versions(spans, num_tokens=4)
    assert versions.tolist() == [[3, 3, 5, -1], [5, -1, -1, -1]]
    assert fresh_tokens(versions, trainer_version=5, max_lag=1).tolist() == [[False] * 4, [True, False, False, False]]
    assert fresh_tokens(versions, 5, 1, "token").tolist() == [[False, False, True, False], [True, False, False, False]]


def test_what_cannot_be_is_refused():
    versions = token_versions([spans_of([7])])
    with pytest.raises(ValueError, match="sampled by version 7, but trainer_version=6"):
        token_lag(versions, 6)
    with pytest.raises(ValueError, match="max_lag=-1"):
        fresh_tokens(versions, 7, -1)
    with pytest.raises(ValueError, match="level='batch'"):
        fresh_tokens(versions, 7, 1, "batch")
    with pytest.raises(ValueError, match="2 tokens, more than num_tokens=1"):
        token_versions([spans_of([1, 1])], num_tokens=1)


def test_no_completion_and_none_with_a_token():
    assert token_versions([]).shape == (0, 0)
    assert fresh_tokens(token_versions([[]]), 0, 0).shape == (1, 0)
