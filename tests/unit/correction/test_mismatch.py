"""k1 and k3 against ``math.fsum``, and what must hold for any input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import measure_mismatch

PAIRS = st.lists(st.tuples(st.floats(-15, 0), st.floats(-15, 0)), min_size=1, max_size=8)


def _tensors(pairs: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor(pairs, dtype=torch.float64)
    return values[:, 0][None], values[:, 1][None]


@given(pairs=PAIRS)
def test_k1_and_k3_are_the_means_of_their_definitions(pairs: list[tuple[float, float]]) -> None:
    trainer, rollout = _tensors(pairs)
    mismatch = measure_mismatch(trainer, rollout, torch.ones_like(trainer))
    k3 = math.fsum(math.exp(t - r) - 1 - (t - r) for t, r in pairs) / len(pairs)
    assert mismatch.k1 == pytest.approx(math.fsum(r - t for t, r in pairs) / len(pairs), abs=1e-12)
    assert mismatch.k3 == pytest.approx(k3, rel=1e-6, abs=1e-9)
    assert mismatch.tokens == len(pairs)


def test_equal_logprobs_have_no_mismatch() -> None:
    logprobs = torch.randn(4, 5)
    mismatch = measure_mismatch(logprobs, logprobs, torch.ones(4, 5))
    assert (mismatch.k1, mismatch.k3, mismatch.tokens) == (0.0, 0.0, 20)


@given(pairs=PAIRS, seed=st.integers(0, 99))
def test_the_order_of_tokens_changes_nothing(pairs: list[tuple[float, float]], seed: int) -> None:
    trainer, rollout = _tensors(pairs)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(trainer)
    one, other = measure_mismatch(trainer, rollout, mask), measure_mismatch(trainer[:, order], rollout[:, order], mask)
    assert one.k1 == pytest.approx(other.k1) and one.k3 == pytest.approx(other.k3)


def test_masked_tokens_have_no_influence() -> None:
    trainer, rollout = torch.tensor([[-1.0, math.nan], [-3.0, -2.0]]), torch.tensor([[-1.5, 0.0], [math.inf, -2.5]])
    mismatch = measure_mismatch(trainer, rollout, torch.tensor([[1, 0], [0, 1]]))
    assert mismatch.tokens == 2 and mismatch.k1 == pytest.approx(-0.5)
