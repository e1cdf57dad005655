"""Streaming statistics against plain Python's exact sums, and against the correction's metrics of the same batch."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import correct, preset
from rollout_service.monitor.statistics import QUANTILES, Statistics
from rollout_service.protocol.mismatch import MismatchRow
from tests.unit.correction.batches import padded
from tests.unit.monitor.batches import BATCH, expected, statistics_of


def row_of(statistics: Statistics) -> MismatchRow:
    return statistics.row(7, "r1")


def moments(row: MismatchRow) -> dict[str, float]:
    apart = {"version", "replica_id", "adapter", "adapter_version", "quantiles", "kv_ages", "suspect_since"}
    return row.model_dump(exclude=apart)


def near(values: dict[str, float]) -> dict[str, object]:
    return {name: pytest.approx(value, rel=1e-9, abs=1e-12) for name, value in values.items()}


@given(batch=BATCH, bound=st.sampled_from([1.1, 2.0, 8.0]))
def test_every_moment_is_what_plain_python_makes_of_the_batch(batch, bound):
    assert moments(row_of(statistics_of(batch, bound))) == near(expected(batch, bound))


@given(batch=BATCH)
def test_statistics_equal_the_correction_metrics_of_a_batch(batch):
    metrics = correct(*padded(batch), preset("token_tis")).metrics
    row = row_of(statistics_of(batch))
    assert moments(row) == near(
        {
            "tokens": sum(map(len, batch)),
            "sequences": len(batch),
            "k1": metrics["rollout_corr/kl"],
            "k3": metrics["rollout_corr/k3_kl"],
            "chi2_token": metrics["rollout_corr/chi2_token"],
            "chi2_seq": metrics["rollout_corr/chi2_seq"],
            "ess_ratio": metrics["rollout_corr/rollout_is_eff_sample_size"],
            "prob_error": metrics["rollout_corr/token_mult_prob_error"],
            "abs_diff_max": metrics["rollout_corr/rollout_train_logprobs_abs_diff_max"],
            "outside_ratio": metrics["rollout_corr/rollout_is_ratio_fraction_high"]
            + metrics["rollout_corr/rollout_is_ratio_fraction_low"],
        }
    )


@given(batches=st.lists(BATCH, min_size=2, max_size=5), data=st.data())
def test_neither_the_split_into_batches_nor_their_order_matters(batches, data):
    order = data.draw(st.permutations(batches))
    merged = Statistics()
    for batch in order:
        merged.merge(statistics_of(batch))
    pairwise = Statistics()
    for batch in batches[1:]:
        pairwise.merge(statistics_of(batch))
    first = statistics_of(batches[0])
    first.merge(pairwise)
    whole = [row for batch in batches for row in batch]
    assert moments(row_of(merged)) == near(expected(whole))
    assert moments(row_of(first)) == near(expected(whole))
    assert row_of(merged).quantiles == row_of(first).quantiles  # small enough for the sketch to hold every value


def test_quantiles_of_a_small_batch_are_its_own_values():
    logs = [i / 128 for i in range(1, 41)]
    row = row_of(statistics_of([[(-log, 0.0) for log in logs]]))
    assert row.quantiles == {q: logs[math.ceil(q * 40) - 1] for q in QUANTILES}


def test_large_stream_quantiles_are_closest_in_rank_at_the_top():
    draws = random.Random(0)
    values = sorted(draws.expovariate(50) for _ in range(200_000))
    shuffled = draws.sample(values, len(values))
    merged = Statistics()
    for start in range(0, len(shuffled), 5000):
        tokens = torch.tensor(shuffled[start : start + 5000], dtype=torch.float64)
        merged.merge(Statistics.of(tokens, torch.empty(0, dtype=torch.float64), 2.0))
    row = row_of(merged)
    assert row.sequences == 0 and row.chi2_seq is None
    for rank, found in row.quantiles.items():
        true_rank = sum(value <= found for value in values) / len(values)
        assert abs(true_rank - rank) < 0.15 * (1 - rank)


def test_one_absurd_token_leaves_every_number_finite():
    row = row_of(statistics_of([[(0.0, -1e30)], [(-1e30, 0.0)]]))
    assert all(math.isfinite(value) for value in moments(row).values())
    assert row.abs_diff_max == 1e30
    assert row.chi2_token == pytest.approx((math.exp(40) - 1 + math.exp(-40) - 1) / 2)
