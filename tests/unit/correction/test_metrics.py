"""verl's off-policy metrics, against plain Python."""

import math

import pytest
from hypothesis import given

from rollout_service.correction import correct
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


def test_one_token_by_hand():
    found = measured([[(math.log(0.2), math.log(0.1))]])
    assert found["kl"] == pytest.approx(-math.log(2))
    assert found["k3_kl"] == pytest.approx(1 - math.log(2))
    assert found["chi2_token"] == found["chi2_seq"] == pytest.approx(3.0)
    assert (found["training_ppl"], found["rollout_ppl"]) == pytest.approx((5.0, 10.0))
    assert found["ppl_ratio"] == pytest.approx(0.5)
    assert found["token_mult_prob_error"] == pytest.approx(2.0)


def test_a_tiny_mismatch_is_not_lost_to_rounding():
    found = measured([[(-1.0 + 1e-8, -1.0)]])
    assert found["k3_kl"] == pytest.approx(0.5e-16, rel=1e-5, abs=0)
    assert found["chi2_token"] == pytest.approx(2e-8, rel=1e-6, abs=0)
