"""Importance weights, against the formulas written out in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import Correction, ImportanceWeights, correct, truncated_importance_weights
from tests.unit.correction import expected
from tests.unit.correction.batches import ROWS, flat, padded, unpadded

LOGPROB = st.floats(min_value=-60, max_value=0, width=32)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=12)
CAP = st.floats(min_value=0.1, max_value=10)


def row(values: list[float]) -> torch.Tensor:
    """[1, tokens] in fp64, so that plain Python's floats are exact."""
    return torch.tensor([values], dtype=torch.float64)


class TestTokenWeights:
    @given(tokens=TOKENS, cap=CAP)
    def test_weights_follow_the_formula_and_stay_within_the_cap(self, tokens, cap):
        trainer, engine = row([t for t, _ in tokens]), row([e for _, e in tokens])
        weights = truncated_importance_weights(trainer, engine, torch.ones(1, len(tokens)), cap=cap)[0].tolist()
        assert weights == pytest.approx([min(math.exp(max(-20.0, min(20.0, t - e))), cap) for t, e in tokens])
        assert all(0 <= weight <= cap for weight in weights)

    @pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
    def test_the_mask_may_have_any_dtype(self, mask_dtype):
        logprobs = torch.zeros(1, 3)
        mask = torch.tensor([[1, 0, 1]]).to(mask_dtype)
        assert truncated_importance_weights(logprobs, logprobs, mask).tolist() == [[1.0, 0.0, 1.0]]

    @pytest.mark.parametrize("cap", [0.0, -1.0, math.nan, math.inf])
    def test_a_cap_that_is_no_positive_number_is_refused(self, cap):
        logprobs = torch.zeros(1, 2)
        with pytest.raises(ValueError, match="cap="):
            truncated_importance_weights(logprobs, logprobs, torch.ones(1, 2), cap=cap)


class TestLevels:
    @given(
        rows=ROWS,
        level=st.sampled_from(["token", "sequence", "geometric"]),
        bounds=st.sampled_from([(None, 2.0), (0.5, 5.0), (0.3, 0.7), (None, math.inf)]),
        outside=st.sampled_from(["truncate", "mask"]),
    )
    def test_weights_of_every_level_follow_the_formula_within_bounds(self, rows, level, bounds, outside):
        lower, upper = bounds
        found = correct(*padded(rows), Correction(ImportanceWeights(level, upper, lower, outside))).weights
        wanted = expected.bounded_weights(rows, level, lower, upper, outside)
        assert unpadded(found, rows) == [pytest.approx(row, rel=1e-9, abs=1e-12) for row in wanted]
        assert all(weight <= upper for weight in flat(found.tolist()))
        if lower is not None:
            assert all(weight >= lower or (outside == "mask" and weight == 0) for weight in flat(unpadded(found, rows)))

    def test_the_levels_by_hand(self):
        rows = [[(math.log(0.2), math.log(0.1)), (math.log(0.8), math.log(0.1))]]
        found = {
            level: correct(*padded(rows), Correction(ImportanceWeights(level, upper=100.0))).weights[0].tolist()
            for level in ("token", "sequence", "geometric")
        }
        assert found["token"] == pytest.approx([2, 8])
        assert found["sequence"] == pytest.approx([16, 16])
        assert found["geometric"] == pytest.approx([4, 4])

    def test_a_weight_on_a_bound_is_within(self):
        recipe = Correction(ImportanceWeights(upper=1.0, lower=1.0, outside="mask"))
        assert correct([[-1.0, -1.0]], [[-1.0, -1.5]], correction=recipe).weights.tolist() == [[1.0, 0.0]]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"level": "batch"}, "level='batch' must be one of token, sequence, geometric"),
            ({"outside": "clip"}, "outside='clip' must be one of truncate, mask"),
            ({"upper": 0.0}, "upper=0.0 must be a positive number"),
            ({"upper": math.nan}, "upper=nan must be a positive number"),
            ({"upper": "2.0"}, "upper='2.0' must be a positive number"),
            ({"lower": -1.0}, "lower=-1.0 must be a positive number"),
            ({"lower": 3.0}, "lower=3.0 is above upper=2.0"),
        ],
    )
    def test_weights_that_make_no_sense_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            ImportanceWeights(**arguments)
