"""Importance weights, against the formulas written out in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import Correction, ImportanceWeights, correct, truncated_importance_weights
from rollout_service.correction.weights import Level, Outside
from tests.unit.correction import expected
from tests.unit.correction.batches import ROWS, flat, padded, unpadded
from tests.unit.correction.expected import Rows

LOGPROB = st.floats(min_value=-60, max_value=0, width=32)
UNUSABLE = st.sampled_from([math.nan, math.inf, -math.inf])
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=12)
CAP = st.floats(min_value=0.1, max_value=10)


def row(values: list[float]) -> torch.Tensor:
    """[1, tokens] in fp64, so that plain Python's floats are exact."""
    return torch.tensor([values], dtype=torch.float64)


class TestTokenWeights:
    def test_a_weight_is_the_trainer_to_engine_probability_ratio(self) -> None:
        trainer, engine = row([math.log(0.3), math.log(0.5)]), row([math.log(0.2), math.log(0.8)])
        weights = truncated_importance_weights(trainer, engine, torch.ones(1, 2))
        assert weights[0].tolist() == pytest.approx([1.5, 0.625])

    def test_equal_policies_weigh_every_token_one(self) -> None:
        logprobs = torch.tensor([[-0.25, -7.0], [0.0, -100.0]])
        assert truncated_importance_weights(logprobs, logprobs, torch.ones(2, 2)).tolist() == [[1.0, 1.0], [1.0, 1.0]]

    def test_weights_are_cut_off_at_the_cap_and_nowhere_else(self) -> None:
        trainer, engine = row([math.log(3.0), math.log(1.9), math.log(0.01)]), row([0.0, 0.0, 0.0])
        mask = torch.ones(1, 3)
        assert truncated_importance_weights(trainer, engine, mask)[0].tolist() == pytest.approx([2.0, 1.9, 0.01])
        assert truncated_importance_weights(trainer, engine, mask, cap=0.5)[0].tolist() == pytest.approx(
            [0.5, 0.5, 0.01]
        )

    def test_log_ratios_are_clamped_to_twenty(self) -> None:
        trainer, engine = row([-100.0, 0.0]), row([0.0, -100.0])
        weights = truncated_importance_weights(trainer, engine, torch.ones(1, 2), cap=1e12)
        assert weights[0].tolist() == pytest.approx([math.exp(-20), math.exp(20)])

    @given(tokens=TOKENS, cap=CAP)
    def test_weights_follow_the_formula_and_stay_within_the_cap(
        self, tokens: list[tuple[float, float]], cap: float
    ) -> None:
        trainer, engine = row([t for t, _ in tokens]), row([e for _, e in tokens])
        weights = truncated_importance_weights(trainer, engine, torch.ones(1, len(tokens)), cap=cap)[0].tolist()
        assert weights == pytest.approx([min(math.exp(max(-20.0, min(20.0, t - e))), cap) for t, e in tokens])
        assert all(0 <= weight <= cap for weight in weights)

    @given(tokens=TOKENS, junk=st.lists(st.tuples(UNUSABLE, UNUSABLE), min_size=1, max_size=4))
    def test_what_masked_positions_hold_has_no_influence(
        self, tokens: list[tuple[float, float]], junk: list[tuple[float, float]]
    ) -> None:
        padded = tokens + junk
        mask = torch.tensor([[True] * len(tokens) + [False] * len(junk)])
        weights = truncated_importance_weights(row([t for t, _ in padded]), row([e for _, e in padded]), mask)
        alone = truncated_importance_weights(row([t for t, _ in tokens]), row([e for _, e in tokens]), mask[:, mask[0]])
        assert weights[0].tolist() == alone[0].tolist() + [0.0] * len(junk)

    def test_no_gradient_flows_through_a_weight(self) -> None:
        trainer = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        weights = truncated_importance_weights(trainer, torch.tensor([[-1.5, -1.5]]), torch.ones(1, 2))
        assert not weights.requires_grad
        (weights * trainer).sum().backward()
        assert trainer.grad is not None
        assert torch.equal(trainer.grad, weights)

    @pytest.mark.parametrize(
        ("given_dtype", "dtype"),
        [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
    )
    def test_weights_are_at_least_fp32(self, given_dtype: torch.dtype, dtype: torch.dtype) -> None:
        logprobs = torch.zeros(1, 2, dtype=given_dtype)
        assert truncated_importance_weights(logprobs, logprobs, torch.ones(1, 2)).dtype is dtype

    @pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
    def test_the_mask_may_have_any_dtype(self, mask_dtype: torch.dtype) -> None:
        logprobs = torch.zeros(1, 3)
        mask = torch.tensor([[1, 0, 1]]).to(mask_dtype)
        assert truncated_importance_weights(logprobs, logprobs, mask).tolist() == [[1.0, 0.0, 1.0]]

    @pytest.mark.parametrize("cap", [0.0, -1.0, math.nan, math.inf])
    def test_a_cap_that_is_no_positive_number_is_refused(self, cap: float) -> None:
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
    def test_weights_of_every_level_follow_the_formula_within_bounds(
        self, rows: Rows, level: Level, bounds: tuple[float | None, float], outside: Outside
    ) -> None:
        lower, upper = bounds
        found = correct(*padded(rows), Correction(ImportanceWeights(level, upper, lower, outside))).weights
        wanted = expected.bounded_weights(rows, level, lower, upper, outside)
        assert unpadded(found, rows) == [pytest.approx(row, rel=1e-9, abs=1e-12) for row in wanted]
        assert all(weight <= upper for weight in flat(found.tolist()))
        if lower is not None:
            assert all(weight >= lower or (outside == "mask" and weight == 0) for weight in flat(unpadded(found, rows)))

    def test_the_levels_by_hand(self) -> None:
        rows = [[(math.log(0.2), math.log(0.1)), (math.log(0.8), math.log(0.1))]]
        found = {
            level: correct(*padded(rows), Correction(ImportanceWeights(level, upper=100.0))).weights[0].tolist()
            for level in ("token", "sequence", "geometric")
        }
        assert found["token"] == pytest.approx([2, 8])
        assert found["sequence"] == pytest.approx([16, 16])
        assert found["geometric"] == pytest.approx([4, 4])

    def test_a_weight_on_a_bound_is_within(self) -> None:
        recipe = Correction(ImportanceWeights(upper=1.0, lower=1.0, outside="mask"))
        assert correct([[-1.0, -1.0]], [[-1.0, -1.5]], correction=recipe).weights.tolist() == [[1.0, 0.0]]

    def test_masked_weights_are_zero_but_tokens_stay_in_the_mask(self) -> None:
        rows = [[(math.log(0.1 * ratio), math.log(0.1)) for ratio in (0.4, 0.6, 4.9, 5.1)]]
        found = correct(*padded(rows), Correction(ImportanceWeights(upper=5.0, lower=0.5, outside="mask")))
        assert found.weights[0].tolist() == pytest.approx([0, 0.6, 4.9, 0])
        assert found.mask.all()

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
    def test_weights_that_make_no_sense_are_refused(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ImportanceWeights(**arguments)  # type: ignore[arg-type]
