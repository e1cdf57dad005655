"""Every token counts for its own version, and a number that is none is named."""

from typing import Any

import pytest

from rollout_service.errors import InvalidRequest, MalformedRequest, NotFound
from rollout_service.monitor.recent import RecentRollouts
from rollout_service.monitor.scoring import parse_report, require_remembered, score
from rollout_service.monitor.statistics import Sums
from rollout_service.protocol.recent_rollout import RecentRollout
from rollout_service.protocol.rollout import Span
from tests.unit.monitor.batches import BOUND, statistics_of
from tests.unit.monitor.reports import body, full, rollout, span


def scored(body: bytes, recent: RecentRollouts | None = None) -> dict[int, Sums]:
    """Sums by version."""
    report = parse_report(body)
    statistics = score(report, require_remembered(report, recent or RecentRollouts(0)), BOUND).statistics
    assert {key.replica_id for key in statistics} <= {"r1"}
    return {key.version: each.sums for key, each in statistics.items()}


def by_replica(body: bytes, recent: RecentRollouts | None = None) -> dict[tuple[int, str], tuple[int, int]]:
    """Tokens and sequences by version and replica."""
    report = parse_report(body)
    both = score(report, require_remembered(report, recent or RecentRollouts(0)), BOUND)
    return {(key.version, key.replica_id): (s.sums.tokens, s.sums.sequences) for key, s in both.statistics.items()}


class TestRows:
    def test_a_sequence_of_one_version_counts_by_token_and_sequence(self) -> None:
        sums = scored(body(full([-1.0, -2.0], [-1.5, -1.0]), full([-0.5], [-0.25])))
        assert sums == {3: statistics_of([[(-1.0, -1.5), (-2.0, -1.0)], [(-0.5, -0.25)]]).sums}

    def test_a_sequence_of_two_versions_counts_by_token_only(self) -> None:
        sums = scored(body(full([-1.0, -2.0, -3.0], [-1.5, -1.0, -3.0], [span(3, 0, 1), span(4, 1, 3)])))
        assert (sums[3].tokens, sums[3].sequences, sums[3].k1) == (1, 0, -0.5)
        assert (sums[4].tokens, sums[4].sequences, sums[4].k1) == (2, 0, 1.0)

    def test_a_sequence_of_two_replicas_counts_by_token_for_each(self) -> None:
        moved = [{**span(3, 0, 2), "replica_id": "a"}, {**span(3, 2, 3), "replica_id": "b"}]
        whole = [{**span(3, 0, 2), "replica_id": "a"}]
        rows = [[-1.0, -1.0, -1.0], [-1.0, -1.0]]
        expected = {(3, "a"): (4, 1), (3, "b"): (1, 0)}
        in_full = [full(row, row, spans) for row, spans in zip(rows, (moved, whole), strict=True)]
        assert by_replica(body(*in_full)) == by_replica(body(*in_full, replica_id=None)) == expected
        ended_on_b = rollout("x", *rows).model_copy(update={"replica_id": "b"})
        completions = [
            c.model_copy(update={"spans": tuple(Span(**s) for s in spans)})
            for c, spans in zip(ended_on_b.completions, (moved, whole), strict=True)
        ]
        recent = RecentRollouts(10_000)
        recent.remember([RecentRollout.of(ended_on_b.model_copy(update={"completions": tuple(completions)}))])
        by_id = body(*({"trainer_logprobs": row} for row in rows), request_id="x", replica_id=None)
        assert by_replica(by_id, recent) == expected

    def test_masked_tokens_have_no_influence_whatever_stands_there(self) -> None:
        spans = [span(3, 0, 2), span(4, 2, 3)]
        masked = full([float("nan"), -2.0, 7.0], [-1.0, -1.0, float("inf")], spans, mask=[False, True, False])
        assert scored(body(masked)) == {3: statistics_of([[(-2.0, -1.0)]]).sums}

    def test_a_completion_without_a_token_that_counts_is_in_no_row(self) -> None:
        assert scored(body(full([], [], []), full([-1.0], [-1.0], mask=[False]))) == {}


class TestRemembered:
    def test_a_remembered_rollout_gives_the_same_as_one_in_full(self) -> None:
        logprobs = [[-0.5, -1.25], [-2.0]]
        trainer = [[-0.75, -1.0], [-2.5]]
        recent = RecentRollouts(10_000)
        recent.remember([RecentRollout.of(rollout("a", *logprobs))])
        by_id = body(*({"trainer_logprobs": row} for row in trainer), request_id="a", replica_id=None)
        in_full = body(*(full(*rows) for rows in zip(trainer, logprobs, strict=True)))
        assert scored(by_id, recent) == scored(in_full)

    def test_a_remembered_completion_can_be_named_by_its_index(self) -> None:
        recent = RecentRollouts(10_000)
        recent.remember([RecentRollout.of(rollout("a", [-0.5], [-2.0]))])
        assert scored(body({"trainer_logprobs": [-2.5], "index": 1}, request_id="a"), recent)[3].k1 == 0.5
        with pytest.raises(InvalidRequest, match=r"rollout a has no completion 2: it has \[0, 1\]"):
            scored(body({"trainer_logprobs": [-2.5], "index": 2}, request_id="a"), recent)

    def test_all_rollouts_that_are_not_remembered_are_named(self) -> None:
        report = parse_report(
            b'{"rollouts": [{"request_id": "a", "completions": [{"trainer_logprobs": []}]},'
            b' {"request_id": "b", "completions": [{"trainer_logprobs": []}]}]}'
        )
        with pytest.raises(NotFound, match=r"2 of 2 rollouts are not remembered \(a, b\)") as missing_ids:
            require_remembered(report, RecentRollouts(0))
        assert missing_ids.value.detail == {"request_ids": ["a", "b"]}


def apart(body: bytes, recent: RecentRollouts | None = None) -> dict[int, int]:
    """Tokens of truncated rollouts by version."""
    report = parse_report(body)
    both = score(report, require_remembered(report, recent or RecentRollouts(0)), BOUND)
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
    def test_what_does_not_fit_is_refused_with_its_place(self, completion: dict[str, Any], says: str) -> None:
        with pytest.raises(InvalidRequest, match=r"rollouts\[0\]\.completions\[1\]" + says):
            scored(body(full([-1.0], [-1.0]), completion))

    def test_a_logprob_just_above_zero_is_rounding(self) -> None:
        assert scored(body(full([1e-6], [0.0])))[3].tokens == 1

    @pytest.mark.parametrize("malformed", [b"", b"{", b"\xff"])
    def test_what_is_no_json_is_refused_as_such(self, malformed: bytes) -> None:
        with pytest.raises(MalformedRequest, match="the body is not JSON"):
            parse_report(malformed)

    def test_a_field_that_does_not_exist_is_named(self) -> None:
        with pytest.raises(InvalidRequest, match=r"rollouts.0.weight_version is not a field here"):
            parse_report(body(full([-1.0], [-1.0]), weight_version=3))


class TestTruncated:
    def test_truncated_tokens_count_apart_by_version_if_not_masked(self) -> None:
        spans = [span(3, 0, 1), span(4, 1, 3)]
        split = full([-1.0] * 3, [-0.5] * 3, spans, mask=[True, False, True])
        assert apart(body(split, full([-1.0], [-0.5]), truncated_sampling=True)) == {3: 2, 4: 1}

    def test_a_rollout_remembered_as_truncated_counts_as_truncated(self) -> None:
        recent = RecentRollouts(10_000)
        recent.remember([RecentRollout.of(rollout("a", [-0.5]).model_copy(update={"truncated_sampling": True}))])
        by_id = body({"trainer_logprobs": [-0.75]}, request_id="a", replica_id=None)
        assert apart(by_id, recent) == {3: 1}

    def test_renormalized_logprobs_of_truncated_rollouts_are_scored(self) -> None:
        renormalized = body(full([-1.0], [-1.5]), truncated_sampling=True, renormalized=True)
        assert scored(renormalized) == scored(body(full([-1.0], [-1.5])))

    def test_an_invalid_logprob_is_named_in_a_truncated_rollout_too(self) -> None:
        with pytest.raises(InvalidRequest, match=r"trainer_logprobs\[0\] is 1 "):
            scored(body(full([1.0], [-1.0]), truncated_sampling=True))
