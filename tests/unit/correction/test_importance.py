"""Token-level TIS against plain Python, and what must hold for any input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import truncated_importance_weights

LOGPROBS = st.lists(st.floats(-30, 0), min_size=1, max_size=6)


@given(trainer=LOGPROBS, rollout=LOGPROBS, cap=st.floats(0.1, 10))
def test_a_weight_is_the_ratio_of_probabilities_cut_off_at_the_cap(
    trainer: list[float], rollout: list[float], cap: float
) -> None:
    length = min(len(trainer), len(rollout))
    trainer, rollout = trainer[:length], rollout[:length]
    expected = [min(math.exp(max(-20.0, min(20.0, t - r))), cap) for t, r in zip(trainer, rollout, strict=True)]
    weights = truncated_importance_weights(
        torch.tensor([trainer], dtype=torch.float64),
        torch.tensor([rollout], dtype=torch.float64),
        torch.ones(1, length, dtype=torch.bool),
        cap=cap,
    )
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-9)


def test_equal_logprobs_weigh_one_and_carry_no_gradient() -> None:
    logprobs = torch.randn(3, 4, requires_grad=True)
    weights = truncated_importance_weights(logprobs, logprobs, torch.ones(3, 4))
    assert torch.equal(weights, torch.ones(3, 4)) and not weights.requires_grad


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_what_masked_positions_hold_has_no_influence(junk: float) -> None:
    trainer, rollout = torch.tensor([[-1.0, junk]]), torch.tensor([[-2.0, junk]])
    weights = truncated_importance_weights(trainer, rollout, torch.tensor([[1, 0]]), cap=10.0)
    assert weights.tolist() == [[pytest.approx(math.e, rel=1e-6), 0.0]]


def test_bad_input_is_refused_by_name() -> None:
    logprobs, mask = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"\[2, 3\], \[2, 2\]"):
        truncated_importance_weights(logprobs, logprobs[:, :2], mask)
    with pytest.raises(ValueError, match="selects no token"):
        truncated_importance_weights(logprobs, logprobs, mask * 0)
    with pytest.raises(ValueError, match="only 0 and 1"):
        truncated_importance_weights(logprobs, logprobs, mask * 0.5)
    with pytest.raises(ValueError, match="cap=0"):
        truncated_importance_weights(logprobs, logprobs, mask, cap=0)
    with pytest.raises(ValueError, match=r"rollout_logprobs\[1, 2\] is nan"):
        broken = logprobs.clone()
        broken[1, 2] = math.nan
        truncated_importance_weights(logprobs, broken, mask)
