"""Importance weights and verl's ``rollout_is_…``, against the formulas written out in plain Python."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import (
    Correction,
    GammaWeights,
    ImportanceWeights,
    Rejection,
    Veto,
    correct,
    truncated_importance_weights,
)
from tests.unit.correction import expected
from tests.unit.correction.batches import ROWS, near, padded, unpadded

LEVELS = st.sampled_from(["token", "sequence", "geometric"])
BOUNDS = st.sampled_from([(None, 2.0), (0.5, 5.0), (0.3, 0.7), (None, 1e12)])
MASKED = ImportanceWeights("token", upper=2.0, lower=0.5, outside="mask", batch_normalize=True)


@given(rows=ROWS, level=LEVELS, bounds=BOUNDS, outside=st.sampled_from(["truncate", "mask"]))
def test_weights_and_their_metrics_follow_the_formula(rows, level, bounds, outside):
    lower, upper = bounds
    found = correct(*padded(rows), Correction(ImportanceWeights(level, upper, lower, outside)))
    wanted = expected.bounded_weights(rows, level, lower, upper, outside)
    assert unpadded(found.weights, rows) == [pytest.approx(row, rel=1e-9, abs=1e-12) for row in wanted]
    metrics = {name.removeprefix("rollout_corr/"): v for name, v in found.metrics.items() if "rollout_is" in name}
    assert metrics == near(expected.of_weights(rows, level, lower, upper, outside))


@given(rows=ROWS, cap=st.floats(min_value=0.1, max_value=10))
def test_truncated_weights_are_those_of_tokens_with_a_cap(rows, cap):
    found = unpadded(truncated_importance_weights(*padded(rows), cap=cap), rows)
    wanted = expected.bounded_weights(rows, "token", None, cap, "truncate")
    assert found == [pytest.approx(row) for row in wanted]


@given(rows=ROWS, level=LEVELS)
def test_normalized_weights_have_mean_one_and_report_the_factor(rows, level):
    plain = correct(*padded(rows), Correction(ImportanceWeights(level, upper=2.0)))
    found = correct(*padded(rows), Correction(ImportanceWeights(level, upper=2.0, batch_normalize=True)))
    units = unpadded(found.weights, rows)
    values = [w for row in units for w in row] if level == "token" else [row[0] for row in units if row]
    factor = found.metrics["rollout_corr/rollout_is_batch_norm_factor"]
    if factor != 1.0:
        assert math.fsum(values) / len(values) == pytest.approx(1.0)
    assert (found.weights * factor).tolist() == [pytest.approx(row) for row in plain.weights.tolist()]
    assert plain.metrics.items() <= found.metrics.items()


def test_weights_that_are_all_masked_are_not_divided_by_zero():
    found = correct([[-3.0]], [[0.0]], correction=Correction(MASKED))
    assert found.weights.tolist() == [[0.0]]
    assert found.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0
    assert found.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0


def test_a_weight_on_a_bound_is_within():
    recipe = Correction(ImportanceWeights(upper=1.0, lower=1.0, outside="mask"))
    assert correct([[-1.0, -1.0]], [[-1.0, -1.5]], correction=recipe).weights.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (ImportanceWeights, {"level": "batch"}, "level='batch' must be one of token, sequence, geometric"),
        (ImportanceWeights, {"outside": "clip"}, "outside='clip' must be one of truncate, mask"),
        (ImportanceWeights, {"upper": math.nan}, "upper=nan must be a positive number"),
        (ImportanceWeights, {"upper": "2.0"}, "upper='2.0' must be a positive number"),
        (ImportanceWeights, {"upper": None}, "upper=None must be a positive number"),
        (ImportanceWeights, {"lower": -1.0}, "lower=-1.0 must be a positive number"),
        (ImportanceWeights, {"lower": 3.0}, "lower=3.0 is above upper=2.0"),
        (GammaWeights, {"k_pos": 0.0}, "GammaWeights: k_pos=0.0 must be a positive number"),
        (GammaWeights, {"k_neg": None}, "GammaWeights: k_neg=None must be a positive number"),
        (GammaWeights, {"lambda_neg": math.inf}, "GammaWeights: lambda_neg=inf must be finite"),
    ],
)
def test_weights_that_make_no_sense_are_refused(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


@pytest.mark.parametrize("cap", [0.0, math.nan, math.inf, None, "2.0", True])
def test_a_cap_that_is_no_positive_number_is_refused(cap):
    with pytest.raises(ValueError, match="cap="):
        truncated_importance_weights(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), cap=cap)


@pytest.mark.parametrize("two", [2, np.float32(2.0), np.float64(2.0), np.int64(2)])
def test_a_bound_may_be_a_number_of_numpy(two):
    rows = [[-1.0, -1.0]], [[-2.0, -1.0]]
    assert truncated_importance_weights(*rows, cap=two).tolist() == [[2.0, 1.0]]
    recipe = Correction(ImportanceWeights(upper=two), (Rejection("token_k3", upper=two),), Veto(upper=two))
    assert correct(*rows, correction=recipe).weights.tolist() == [[0.0, 0.0]]
    assert GammaWeights(k_pos=two) == GammaWeights()
