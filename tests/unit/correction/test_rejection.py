"""Which tokens and sequences a rejection takes out, and its metrics, against plain Python."""

import math
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollout_service.correction import Correction, Rejection, Veto, correct
from rollout_service.correction.rejection import Statistic
from tests.unit.correction import expected
from tests.unit.correction.batches import ROWS, flat, near, padded, unpadded
from tests.unit.correction.expected import Rows

STATISTICS = st.sampled_from(get_args(Statistic))


def kept(rows: Rows, recipe: Correction) -> list[list[float]]:
    return unpadded(correct(*padded(rows), recipe).mask, rows)


@given(rows=ROWS, statistic=STATISTICS, upper=st.floats(1.01, 50), lower=st.none() | st.floats(0.01, 1))
def test_a_token_is_kept_iff_its_statistic_is_within_the_bounds(rows, statistic, upper, lower):
    ratio = statistic.endswith("k1")
    recipe = Rejection(statistic, upper, lower if ratio else None)
    low = math.log(1 / upper if lower is None else lower) if ratio else 0.0
    high = math.log(upper) if ratio else upper
    wanted = expected.statistic(rows, statistic)
    # Sums in another order may fall on the other side of a bound.
    assume(
        all(abs(value - bound) > 1e-9 * max(1, abs(bound)) for value in flat(wanted) for bound in (low or 1e9, high))
    )
    assume(low == 0.0 or all(abs(value) > 1e-12 for value in flat(wanted) if value))
    assert kept(rows, Correction(rejections=(recipe,))) == [[low <= value <= high for value in row] for row in wanted]
    metrics = correct(*padded(rows), Correction(rejections=(recipe,))).metrics
    of_rejection = expected.of_rejection(rows, statistic, low, high)
    assert {name: metrics[f"rollout_corr/{name}"] for name in of_rejection} == near(of_rejection)


@pytest.mark.parametrize(
    "recipe", [Rejection("token_k1", 1.0), Rejection("token_k2", 2.0), Rejection("seq_max_k2", 2.0)]
)
def test_a_statistic_on_its_bound_is_kept(recipe):
    on_the_bound = {"k1": 0.0, "k2": -2.0}[recipe.statistic[-2:]]  # nats from the rollout's logprob
    assert kept([[(on_the_bound - 4.0, -4.0)]], Correction(rejections=(recipe,))) == [[True]]
    assert kept([[(on_the_bound - 4.5, -4.0)]], Correction(rejections=(recipe,))) == [[False]]


@given(rows=ROWS, lower=st.sampled_from([None, 1e-4, 1e-12]), upper=st.sampled_from([None, 100.0, 1e12]))
def test_one_token_outside_the_veto_drops_its_sequence(rows, lower, upper):
    assume(lower is not None or upper is not None)
    low, high = math.log(lower or 1e-300), math.log(upper or 1e300)
    outside = [[not low <= log <= high for log in expected.log_ratios(row)] for row in rows]
    found = correct(*padded(rows), Correction(veto=Veto(lower, upper)))
    assert unpadded(found.mask, rows) == [[not any(row)] * len(row) for row in outside]
    tokens, sequences = flat(outside), [any(row) for row in outside if row]
    assert found.metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx(
        sum(tokens) / len(tokens)
    )
    assert found.metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(sum(sequences) / len(sequences))


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
        (Rejection, {"statistic": "token_k1", "upper": None}, "upper=None must be a positive number"),
        (Rejection, {"statistic": "seq_mean_k3", "upper": None}, "upper=None must be a positive number"),
        (Rejection, {"statistic": "token_k1", "upper": 2.0, "only_if": "always"}, "one of diverging, negative"),
        (Veto, {"lower": None}, "neither"),
        (Veto, {"lower": 2.0, "upper": 1.0}, "above upper"),
        (Veto, {"lower": math.inf}, "finite"),
    ],
)
def test_what_makes_no_sense_is_refused(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


@pytest.mark.parametrize("statistic", get_args(Statistic))
def test_metrics_of_logprobs_far_above_zero_are_finite(statistic):
    found = correct([[800.0, -1.0]], [[900.0, -1.0]], correction=Correction(rejections=(Rejection(statistic, 1.5),)))
    assert all(map(math.isfinite, found.metrics.values()))
    if "prob_diff" in statistic:
        assert not found.mask[0, 0]
