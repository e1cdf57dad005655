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
def test_both_follow_the_formula(tokens: list[tuple[float, float]]) -> None:
    measured = measure_mismatch(row([t for t, _ in tokens]), row([e for _, e in tokens]), torch.ones(1, len(tokens)))
    count = len(tokens)
    assert measured.k1 == pytest.approx(math.fsum(e - t for t, e in tokens) / count, abs=1e-12)
    expected_k3 = math.fsum(math.expm1(t - e) - (t - e) for t, e in tokens) / count
    assert measured.k3 == pytest.approx(expected_k3, rel=1e-9, abs=1e-15)
    assert measured.tokens == count


@given(tokens=TOKENS)
def test_k3_is_never_negative_and_k1_changes_sign_with_the_roles(tokens: list[tuple[float, float]]) -> None:
    trainer, engine, mask = row([t for t, _ in tokens]), row([e for _, e in tokens]), torch.ones(1, len(tokens))
    measured, swapped = measure_mismatch(trainer, engine, mask), measure_mismatch(engine, trainer, mask)
    assert measured.k3 >= 0
    assert measured.k1 == -swapped.k1


def test_the_same_logprobs_have_no_mismatch() -> None:
    logprobs = torch.tensor([[-0.5, -3.0]])
    measured = measure_mismatch(logprobs, logprobs, torch.ones(1, 2))
    assert (measured.k1, measured.k3) == (0.0, 0.0)


def test_k1_and_k3_over_engine_samples_are_the_kl_divergence() -> None:
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


def test_tiny_mismatch_is_not_lost_to_rounding() -> None:
    measured = measure_mismatch(row([-1.0 + 1e-6]), row([-1.0]), torch.ones(1, 1))
    assert measured.k3 == pytest.approx(0.5e-12, rel=1e-3)


def test_one_absurd_token_leaves_k3_finite_and_k1_unclamped() -> None:
    measured = measure_mismatch(row([0.0, -1.0]), row([-1000.0, -1.0]), torch.ones(1, 2))
    assert measured.k1 == pytest.approx(-500.0)
    assert measured.k3 == pytest.approx((math.exp(20) - 1 - 20) / 2)


@given(tokens=TOKENS, junk=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_masked_positions_hold_has_no_influence(tokens: list[tuple[float, float]], junk: float) -> None:
    trainer, engine = [t for t, _ in tokens], [e for _, e in tokens]
    mask = torch.tensor([[False] + [True] * len(tokens)])
    assert measure_mismatch(row([junk, *trainer]), row([junk, *engine]), mask) == measure_mismatch(
        row(trainer), row(engine), mask[:, 1:]
    )


def test_means_are_over_tokens_and_not_over_rows() -> None:
    trainer = torch.tensor([[-1.0, math.nan, math.nan], [-1.0, -1.0, -1.0]])
    engine = torch.tensor([[-3.0, math.nan, math.nan], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    assert measure_mismatch(trainer, engine, mask).k1 == pytest.approx(-0.5)


def test_a_measurement_cannot_be_changed() -> None:
    measured = measure_mismatch(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    with pytest.raises(AttributeError):
        measured.k1 = 1.0  # type: ignore[misc]
