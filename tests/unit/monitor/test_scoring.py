"""Every token counts for its own version, and a number that is none is named."""

import pytest

from rollout_service.errors import InvalidRequest, MalformedRequest
from rollout_service.monitor.scoring import parse_report, score
from rollout_service.monitor.statistics import Sums
from tests.unit.monitor.batches import BOUND, statistics_of
from tests.unit.monitor.reports import body, full, span


def scored(body: bytes) -> dict[int, Sums]:
    """Sums by version."""
    statistics = score(parse_report(body), BOUND).statistics
    assert {key.replica_id for key in statistics} <= {"r1"}
    return {key.version: each.sums for key, each in statistics.items()}


def by_replica(body: bytes) -> dict[tuple[int, str], tuple[int, int]]:
    """Tokens and sequences by version and replica."""
    both = score(parse_report(body), BOUND)
    return {(key.version, key.replica_id): (s.sums.tokens, s.sums.sequences) for key, s in both.statistics.items()}


class TestRows:
    def test_a_sequence_of_one_version_counts_by_token_and_sequence(self):
        sums = scored(body(full([-1.0, -2.0], [-1.5, -1.0]), full([-0.5], [-0.25])))
        assert sums == {3: statistics_of([[(-1.0, -1.5), (-2.0, -1.0)], [(-0.5, -0.25)]]).sums}

    def test_a_sequence_of_two_versions_counts_by_token_only(self):
        sums = scored(body(full([-1.0, -2.0, -3.0], [-1.5, -1.0, -3.0], [span(3, 0, 1), span(4, 1, 3)])))
        assert (sums[3].tokens, sums[3].sequences, sums[3].k1) == (1, 0, -0.5)
        assert (sums[4].tokens, sums[4].sequences, sums[4].k1) == (2, 0, 1.0)

    def test_a_sequence_of_two_replicas_counts_by_token_for_each(self):
        moved = [{**span(3, 0, 2), "replica_id": "a"}, {**span(3, 2, 3), "replica_id": "b"}]
        whole = [{**span(3, 0, 2), "replica_id": "a"}]
        rows = [[-1.0, -1.0, -1.0], [-1.0, -1.0]]
        expected = {(3, "a"): (4, 1), (3, "b"): (1, 0)}
        in_full = [full(row, row, spans) for row, spans in zip(rows, (moved, whole), strict=True)]
        assert by_replica(body(*in_full)) == by_replica(body(*in_full, replica_id=None)) == expected

    def test_masked_tokens_have_no_influence_whatever_stands_there(self):
        spans = [span(3, 0, 2), span(4, 2, 3)]
        masked = full([float("nan"), -2.0, 7.0], [-1.0, -1.0, float("inf")], spans, mask=[False, True, False])
        assert scored(body(masked)) == {3: statistics_of([[(-2.0, -1.0)]]).sums}

    def test_a_completion_without_a_token_that_counts_is_in_no_row(self):
        assert scored(body(full([], [], []), full([-1.0], [-1.0], mask=[False]))) == {}


def apart(body: bytes) -> dict[int, int]:
    """Tokens of truncated rollouts by version."""
    both = score(parse_report(body), BOUND)
    assert not both.statistics
    return {key.version: tokens for key, tokens in both.truncated.items()}


class TestRefused:
    @pytest.mark.parametrize(
        ("completion", "says"),
        [
            (full([-1.0], [-1.0, -1.0]), r"\.trainer_logprobs has 1 entries, but 2 tokens were sampled"),
            (full([-1.0], [-1.0], mask=[]), r"\.mask has 0 entries, but 1 tokens"),
            (full([-1.0, 0.01], [-1.0, -1.0]), r"\.trainer_logprobs\[1\] is 0.01 \(1 such of 2\)"),
            (full([float("nan")], [-1.0]), r"\.trainer_logprobs\[0\] is nan"),
            (full([-1.0], [float("-inf")]), r"\.rollout_logprobs\[0\] is -inf"),
            (full([-1e300], [-1.0]), r"\.trainer_logprobs\[0\] is -1e\+300"),
            (full([-1.0, -1.0], [-1.0, -1.0], [span(3, 0, 1)]), r"\.spans do not cover the 2 tokens"),
            (full([-1.0, -1.0], [-1.0, -1.0], [span(3, 1, 2)]), r"\.spans do not cover the 2 tokens"),
            (full([-1.0], [-1.0], []), r"\.spans do not cover the 1 tokens"),
        ],
    )
    def test_what_does_not_fit_is_refused_with_its_place(self, completion, says):
        for truncated in (False, True):  # a logprob just above zero is rounding
            with pytest.raises(InvalidRequest, match=r"rollouts\[0\]\.completions\[1\]" + says):
                scored(body(full([1e-6], [-1.0]), completion, truncated_sampling=truncated))

    def test_what_is_no_json_or_no_field_is_named(self):
        with pytest.raises(MalformedRequest, match="the body is not JSON"):
            parse_report(b"{")
        with pytest.raises(InvalidRequest, match=r"rollouts.0.weight_version is not a field here"):
            parse_report(body(full([-1.0], [-1.0]), weight_version=3))


class TestTruncated:
    def test_truncated_tokens_count_apart_by_version_if_not_masked(self):
        spans = [span(3, 0, 1), span(4, 1, 3)]
        split = full([-1.0] * 3, [-0.5] * 3, spans, mask=[True, False, True])
        assert apart(body(split, full([-1.0], [-0.5]), truncated_sampling=True)) == {3: 2, 4: 1}

    def test_renormalized_logprobs_of_truncated_rollouts_are_scored(self):
        renormalized = body(full([-1.0], [-1.5]), truncated_sampling=True, renormalized=True)
        assert scored(renormalized) == scored(body(full([-1.0], [-1.5])))
