"""Which tokens and sequences a rejection takes out where verl's record has none: at bounds, absurd, and equal ones."""

import math

import pytest

from rollout_service.correction import Correction, Rejection, Veto, correct
from tests.unit.correction.batches import Rows, of_ratios, padded, unpadded

FAR_BINARY_KL = (1 - 2e-6) * math.log((1 - 1e-6) / 1e-6)


def kept(rows: Rows, recipe: Correction) -> list[list[float]]:
    return unpadded(correct(*padded(rows), recipe).mask, rows)


def metric(rows: Rows, recipe: Correction, name: str) -> float:
    return correct(*padded(rows), recipe).metrics[f"rollout_corr/{name}"]


@pytest.mark.parametrize(
    ("statistic", "value"),
    [
        ("token_k1", -20.0),
        ("token_k2", 200.0),
        ("token_k3", math.exp(20) - 21),
        ("token_m2", 900.0),
        ("seq_mean_prob_diff", 1.0),
        ("seq_mean_prob_error", math.exp(20)),
        ("seq_mean_ratio_diff", math.exp(20) - 1),
        ("token_binary_kl_both", FAR_BINARY_KL),
    ],
)
def test_a_statistic_of_an_absurd_token_is_finite(statistic, value):
    rows: Rows = [[(0.0, -30.0)]]
    assert metric(rows, Correction(rejections=(Rejection(statistic, 1.0),)), f"rollout_rs_{statistic}_max") == (
        pytest.approx(value)
    )


def test_an_upper_bound_of_a_ratio_alone_is_a_band():
    recipe = Correction(rejections=(Rejection("token_k1", 2.0),))
    rows = of_ratios([0.51, 1.9], [0.49, 2.1])
    assert kept(rows, recipe) == [[True, True], [False, False]]
    assert metric(rows, recipe, "rollout_rs_token_k1_fraction_low") == 0.25


def test_equal_squares_are_rejected_together():
    rows = of_ratios([math.e, 1.0], [math.e])  # the mean square of all three is 2/3, of the first two 1/2
    assert kept(rows, Correction(rejections=(Rejection("token_m2", 0.6),))) == [[False, True], [False]]


@pytest.mark.parametrize(
    "recipe", [Rejection("token_k1", 1.0), Rejection("token_k2", 2.0), Rejection("seq_max_k2", 2.0)]
)
def test_a_statistic_on_its_bound_is_kept(recipe):
    on_the_bound = {"k1": 0.0, "k2": -2.0}[recipe.statistic[-2:]]  # nats from the rollout's logprob
    assert kept([[(on_the_bound - 4.0, -4.0)]], Correction(rejections=(recipe,))) == [[True]]
    assert kept([[(on_the_bound - 4.5, -4.0)]], Correction(rejections=(recipe,))) == [[False]]


@pytest.mark.parametrize(
    ("veto", "sign"), [(Veto(1e-12), 1), (Veto(None, 1e12), -1), (Veto(1e-12, 1e12), 1), (Veto(1e-12, 1e12), -1)]
)
def test_one_token_outside_the_veto_drops_its_sequence(veto, sign):
    rows = of_ratios([1e-11**sign, 1.0], [], [1e-13**sign, 1.0, 1.0])
    recipe = Correction(veto=veto)
    assert kept(rows, recipe) == [[True, True], [], [False, False, False]]
    assert metric(rows, recipe, "rollout_is_catastrophic_token_fraction") == pytest.approx(1 / 5)
    assert metric(rows, recipe, "rollout_is_veto_fraction") == pytest.approx(1 / 2)


def test_padding_vetoes_nothing_even_where_equal_policies_would():
    rows = [[(-2.0, -1.0)] * 2, [(-2.0, -1.0)]]
    assert kept(rows, Correction(veto=Veto(lower=None, upper=0.5))) == [[True, True], [True]]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Rejection, {"statistic": "seq_max_k1", "upper": 2.0}, "one of token_k1"),
        (Rejection, {"statistic": "token_k3", "upper": 2.0, "lower": 0.1}, "only an upper bound"),
        (Rejection, {"statistic": "token_k1", "upper": 0.5}, "at least 1"),
        (Rejection, {"statistic": "seq_mean_k1", "upper": math.inf}, "give a finite number"),
        (Rejection, {"statistic": "token_k1", "upper": 0.5, "lower": 0.7}, "above upper"),
        (Rejection, {"statistic": "token_k2", "upper": 0.0}, "positive"),
        (Rejection, {"statistic": "token_k1", "upper": True}, "positive"),
        (Rejection, {"statistic": "token_k1", "upper": 2.0, "only_if": "always"}, "one of diverging, negative"),
        (Veto, {"lower": None}, "neither"),
        (Veto, {"lower": 2.0, "upper": 1.0}, "above upper"),
        (Veto, {"lower": math.inf}, "finite"),
    ],
)
def test_what_makes_no_sense_is_refused(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)
