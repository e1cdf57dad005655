"""Importance weights and ``rollout_is_…`` where verl's record has none: by hand, at bounds, and all masked."""

import math

import pytest
import torch

from rollout_service.correction import (
    Correction,
    GammaWeights,
    ImportanceWeights,
    correct,
    truncated_importance_weights,
)
from tests.unit.correction.batches import of_ratios, padded, unpadded

MASKED = ImportanceWeights("token", upper=2.0, lower=0.5, outside="mask", batch_normalize=True)


def test_a_geometric_mean_weighs_all_tokens_of_its_sequence():
    rows = of_ratios([4.0, 1.0], [9.0], [], [0.25, 0.25])  # geometric means 2, 9 and 0.25
    recipe = ImportanceWeights("geometric", upper=3.0, batch_normalize=True)
    found = correct(*padded(rows), Correction(recipe))
    mean = (2 + 3 + 0.25) / 3
    weights = [[2 / mean, 2 / mean], [3 / mean], [], [0.25 / mean, 0.25 / mean]]
    assert unpadded(found.weights, rows) == [pytest.approx(row) for row in weights]
    assert not found.weights[~found.mask].any()
    metrics = {
        "batch_norm_factor": mean,
        "mean": 1.5,
        "max": 9.0,
        "min": 0.25,
        "ratio_fraction_high": 1 / 3,
        "ratio_fraction_low": 1 / 3,
        "seq_mean": mean,
        "seq_max": 3.0,
        "seq_fraction_high": 1 / 3,
        "seq_fraction_low": 1 / 3,
    }
    assert {name: found.metrics[f"rollout_corr/rollout_is_{name}"] for name in metrics} == pytest.approx(metrics)


def test_ratios_are_truncated_to_both_bounds():
    rows = of_ratios([0.4, 0.6, 0.8], [1.9, 2.1])
    found = correct(*padded(rows), Correction(ImportanceWeights(upper=2.0, lower=0.5)))
    assert unpadded(found.weights, rows) == [pytest.approx(row) for row in ([0.5, 0.6, 0.8], [1.9, 2.0])]
    assert found.metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 0.2
    assert found.metrics["rollout_corr/rollout_is_seq_max"] == pytest.approx(1.95)
    assert "rollout_corr/rollout_is_oob_ratio" not in found.metrics  # nothing is masked


def test_truncated_weights_are_those_of_tokens_with_a_cap():
    rows = of_ratios([0.4, 3.0], [1.9])
    assert unpadded(truncated_importance_weights(*padded(rows)), rows) == [
        pytest.approx([0.4, 2.0]),
        [pytest.approx(1.9)],
    ]
    absurd = truncated_importance_weights([[-1.0]], [[-31.0]], cap=1e12)
    assert absurd.tolist() == [[pytest.approx(math.exp(20))]]


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
        (ImportanceWeights, {"lower": -1.0}, "lower=-1.0 must be a positive number"),
        (ImportanceWeights, {"lower": 3.0}, "lower=3.0 is above upper=2.0"),
        (GammaWeights, {"k_pos": 0.0}, "GammaWeights k_pos: .* must be a positive number"),
        (GammaWeights, {"lambda_neg": math.inf}, "GammaWeights lambda_neg: .* must be finite"),
    ],
)
def test_weights_that_make_no_sense_are_refused(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


@pytest.mark.parametrize("cap", [0.0, math.nan, math.inf])
def test_a_cap_that_is_no_positive_number_is_refused(cap):
    with pytest.raises(ValueError, match="cap="):
        truncated_importance_weights(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), cap=cap)
