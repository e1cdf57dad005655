"""k1 and k3, against plain Python's exact sums and against the divergence they estimate."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import measure_mismatch

LOGPROB = st.floats(min_value=-15, max_value=0, width=32)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=20)


def row(values: list[float]) -> torch.Tensor:
    """[1, tokens] in fp64, so that plain Python's floats are exact."""
    return torch.tensor([values], dtype=torch.float64)


@given(tokens=TOKENS)
def test_both_follow_the_formula(tokens):
    measured = measure_mismatch(row([t for t, _ in tokens]), row([e for _, e in tokens]), torch.ones(1, len(tokens)))
    count = len(tokens)
    assert measured.k1 == pytest.approx(math.fsum(e - t for t, e in tokens) / count, abs=1e-12)
    expected_k3 = math.fsum(math.expm1(t - e) - (t - e) for t, e in tokens) / count
    assert measured.k3 == pytest.approx(expected_k3, rel=1e-9, abs=1e-15)
    assert measured.tokens == count


def test_k1_and_k3_over_engine_samples_are_the_kl_divergence():
    engine, trainer = [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]
    sampled = [0] * 5 + [1] * 3 + [2] * 2
    measured = measure_mismatch(
        row([math.log(trainer[token]) for token in sampled]),
        row([math.log(engine[token]) for token in sampled]),
        torch.ones(1, 10),
    )
    divergence = math.fsum(e * math.log(e / t) for e, t in zip(engine, trainer, strict=True))
    assert measured.k1 == pytest.approx(divergence)
    assert measured.k3 == pytest.approx(divergence)


def test_one_absurd_token_leaves_k3_finite_and_k1_unclamped():
    measured = measure_mismatch(row([0.0, -1.0]), row([-1000.0, -1.0]), torch.ones(1, 2))
    assert measured.k1 == pytest.approx(-500.0)
    assert measured.k3 == pytest.approx((math.exp(20) - 1 - 20) / 2)
