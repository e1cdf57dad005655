"""verl's off-policy metrics, and k1 and k3 of ``measure_mismatch``, against plain Python."""

import math

import pytest
import torch
from hypothesis import given

from rollout_service.correction import Mismatch, correct, measure_mismatch
from tests.unit.correction import expected
from tests.unit.correction.batches import ROWS, padded
from tests.unit.correction.expected import Rows


def measured(rows: Rows) -> dict[str, float]:
    return {name.removeprefix("rollout_corr/"): value for name, value in correct(*padded(rows)).metrics.items()}


@given(rows=ROWS)
def test_every_metric_follows_its_formula(rows):
    found, wanted = measured(rows), expected.mismatch(rows)
    assert found.keys() == wanted.keys()
    assert found == {name: pytest.approx(value, rel=1e-9, abs=1e-9) for name, value in wanted.items()}
    tokens = sum(map(len, rows))
    assert measure_mismatch(*padded(rows)) == Mismatch(k1=found["kl"], k3=found["k3_kl"], tokens=tokens)


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
