"""The off-policy metrics that verl's record lacks, ``measure_mismatch``, and values that rounding or ``exp`` spoil."""

import math

import pytest
import torch

from rollout_service.correction import Mismatch, correct, measure_mismatch
from tests.unit.correction.batches import Rows, padded


def measured(rows: Rows) -> dict[str, float]:
    return {name.removeprefix("rollout_corr/"): value for name, value in correct(*padded(rows)).metrics.items()}


def test_distances_are_over_the_tokens_of_all_sequences():
    rows: Rows = [[(-1.0, -1.5), (-2.0, -1.0)], [], [(-3.0, -3.0)]]  # log-ratios 0.5, -1 and 0
    found = measured(rows)
    assert found["token_mult_prob_error"] == pytest.approx((math.exp(0.5) + math.e + 1) / 3)
    assert found["rollout_train_logprobs_abs_diff_mean"] == pytest.approx(0.5)
    assert found["rollout_train_logprobs_abs_diff_max"] == pytest.approx(1.0)
    assert found["rollout_train_logprobs_abs_diff_std"] == pytest.approx(math.sqrt(1 / 6))
    assert measure_mismatch(*padded(rows)) == Mismatch(k1=found["kl"], k3=found["k3_kl"], tokens=3)


def test_a_tiny_mismatch_is_not_lost_to_rounding():
    found = measured([[(-1.0 + 1e-8, -1.0)]])
    assert found["k3_kl"] == pytest.approx(0.5e-16, rel=1e-5, abs=0)
    assert found["chi2_token"] == pytest.approx(2e-8, rel=1e-6, abs=0)


def test_k1_and_k3_over_engine_samples_are_the_kl_divergence():
    engine, trainer = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    sampled = torch.tensor([[0] * 5 + [1] * 3 + [2] * 2])
    found = measure_mismatch(trainer.log()[sampled], engine.log()[sampled], torch.ones(1, 10))
    divergence = (engine * (engine / trainer).log()).sum().item()
    assert (found.k1, found.k3) == (pytest.approx(divergence), pytest.approx(divergence))


def test_one_absurd_token_leaves_k3_finite_and_k1_unclamped():
    found = measure_mismatch([[0.0, -1.0]], [[-1000.0, -1.0]])
    assert found.k1 == pytest.approx(-500.0)
    assert found.k3 == pytest.approx((math.exp(20) - 1 - 20) / 2)
