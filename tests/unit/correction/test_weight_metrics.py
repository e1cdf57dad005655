"""verl's ``rollout_is_…``, against plain Python."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import Correction, ImportanceWeights, correct
from tests.unit.correction import expected
from tests.unit.correction.batches import ROWS, near, padded, unpadded
from tests.unit.correction.expected import Rows

LEVELS = st.sampled_from(["token", "sequence", "geometric"])
BOUNDS = st.sampled_from([(None, 2.0), (0.5, 5.0), (0.3, 0.7), (None, 1e12)])


def measured(rows: Rows, recipe: ImportanceWeights) -> dict[str, float]:
    metrics = correct(*padded(rows), Correction(recipe)).metrics
    return {name.removeprefix("rollout_corr/"): value for name, value in metrics.items() if "rollout_is" in name}


@given(rows=ROWS, level=LEVELS, bounds=BOUNDS, outside=st.sampled_from(["truncate", "mask"]))
def test_every_metric_follows_its_formula(rows, level, bounds, outside):
    lower, upper = bounds
    found = measured(rows, ImportanceWeights(level, upper, lower, outside))
    wanted = expected.of_weights(rows, level, lower, upper, outside)
    assert found == near(wanted)


def test_effective_sample_size_is_zero_if_all_weights_are_masked():
    found = measured([[(-3.0, 0.0)]], ImportanceWeights("token", upper=2.0, lower=0.5, outside="mask"))
    assert found["rollout_is_eff_sample_size"] == 0.0


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
    recipe = ImportanceWeights("token", upper=2.0, lower=0.5, outside="mask", batch_normalize=True)
    found = correct([[-3.0]], [[0.0]], correction=Correction(recipe))
    assert found.weights.tolist() == [[0.0]]
    assert found.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0
