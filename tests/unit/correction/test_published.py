"""The recipes of 2026 on random batches, against each source's formula in plain Python and fp64."""

import math
import random
from collections.abc import Callable
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import Correction, GammaWeights, correct, preset
from tests.unit.correction.batches import flat, padded, unpadded
from tests.unit.correction.expected import Rows, binary_kl

Advantages = list[list[float]]
Row = list[tuple[float, float]]
SEEDS = st.integers(0, 2**32 - 1)


def random_batch(seed: int, per_token: bool) -> tuple[Rows, Advantages]:
    """Sequences whose mismatch is small, large or absent, so that every bound has tokens on both sides."""
    draw = random.Random(seed)
    rows, advantages = [], []
    for _ in range(draw.randint(1, 6)):
        scale = draw.choice([0.0, 1e-4, 1e-3, 0.02, 0.2, 1.0, 3.0])
        rollout = [-draw.expovariate(draw.choice([0.2, 1.0, 5.0])) - 1e-6 for _ in range(draw.randint(0, 8))]
        rows.append([(min(value + draw.gauss(0, scale), -1e-7), value) for value in rollout])
        of_sequence = draw.choice([-1.3, -0.4, 0.0, 0.7, 2.0])
        advantages.append([draw.gauss(0, 1) if per_token else of_sequence for _ in rollout])
    return (rows, advantages) if any(rows) else random_batch(seed + 1, per_token)


def ratios(row: Row) -> list[float]:
    return [math.exp(trainer - rollout) for trainer, rollout in row]


def probabilities(row: Row) -> list[tuple[float, float]]:
    return [(math.exp(trainer), math.exp(rollout)) for trainer, rollout in row]


def per_sequence(weigh: Callable[[Row, list[float]], list[float]]) -> Callable[[Rows, Advantages], list[list[float]]]:
    """A formula of one sequence, not empty, as one of a batch."""
    return lambda rows, advantages: [weigh(*pair) if pair[0] else [] for pair in zip(rows, advantages, strict=True)]


@per_sequence
def skyrl_token_mask(row: Row, _: list[float]) -> list[float]:
    return [float(0.5 <= ratio <= 2.0) for ratio in ratios(row)]


@per_sequence
def geo_rs_token_mis(row: Row, _: list[float]) -> list[float]:
    geometric = math.prod(ratios(row)) ** (1 / len(row))
    return [ratio if 0.999 <= 1 / geometric <= 1.001 and 0.5 <= ratio <= 2.0 else 0.0 for ratio in ratios(row)]


@per_sequence
def trust_region_mask(row: Row, _: list[float]) -> list[float]:
    largest = max(math.log(ratio) ** 2 / 2 for ratio in ratios(row))
    mean = fmean(ratio - 1 - math.log(ratio) for ratio in ratios(row))
    return [float(largest <= 2.5 and mean <= 0.01)] * len(row)


@per_sequence
def areal_behave_cap(row: Row, _: list[float]) -> list[float]:
    return [ratio if ratio <= 5.0 else 0.0 for ratio in ratios(row)]


@per_sequence
def areal_geo_mask(row: Row, _: list[float]) -> list[float]:
    geometric = math.prod(ratios(row)) ** (1 / len(row))
    return [geometric if geometric <= 5.0 else 0.0] * len(row)


@per_sequence
def kpop(row: Row, _: list[float]) -> list[float]:
    keeps = [max(binary_kl(p, mu), binary_kl(mu, p)) <= 0.1 for p, mu in probabilities(row)]
    return [ratio * keep for ratio, keep in zip(ratios(row), keeps, strict=True)]


@per_sequence
def flash_reinforce(row: Row, _: list[float]) -> list[float]:
    keep = fmean(binary_kl(mu, p) for p, mu in probabilities(row)) <= 5e-3
    return [ratio * keep for ratio in ratios(row)]


def m2po(rows: Rows, _: Advantages) -> list[list[float]]:
    """Drop the largest square until the mean of the others is within the threshold."""
    left = sorted((trainer - rollout) ** 2 for row in rows for trainer, rollout in row)
    while left and fmean(left) > 0.04:
        left.pop()
    largest = left[-1] if left else -1.0
    return [
        [ratio * ((pair[0] - pair[1]) ** 2 <= largest) for ratio, pair in zip(ratios(row), row, strict=True)]
        for row in rows
    ]


@per_sequence
def dppo_tv(row: Row, advantages: list[float]) -> list[float]:
    found = []
    for (p, mu), ratio, advantage in zip(probabilities(row), ratios(row), advantages, strict=True):
        valid = p - mu <= 0.15 if advantage > 0 else p - mu >= -0.15
        found.append(min(ratio, 20.0) * valid)
    return found


@per_sequence
def dppo_kl(row: Row, advantages: list[float]) -> list[float]:
    found = []
    for (p, mu), ratio, advantage in zip(probabilities(row), ratios(row), advantages, strict=True):
        near = binary_kl(mu, p) <= 0.05
        valid = near or (p <= mu if advantage > 0 else p >= mu)
        found.append(min(ratio, 20.0) * valid)
    return found


@per_sequence
def tvpo(row: Row, advantages: list[float]) -> list[float]:
    far = fmean(abs(ratio - 1) for ratio in ratios(row)) > 2.0
    pairs = zip(ratios(row), advantages, strict=True)
    return [0.0 if far and advantage * math.log(ratio) > 0 else min(ratio, 2.0) for ratio, advantage in pairs]


@per_sequence
def opsm(row: Row, advantages: list[float]) -> list[float]:
    far = fmean(rollout - trainer for trainer, rollout in row) > 1e-4
    return [0.0 if far and advantage < 0 else 1.0 for advantage in advantages]


@per_sequence
def vespo(row: Row, advantages: list[float]) -> list[float]:
    w = min(max(math.prod(ratios(row)), 1e-8), math.exp(20))
    parameters = [(2.0, 3.0) if advantage >= 0 else (3.0, 2.0) for advantage in advantages]
    return [math.exp(scale) * w**k * math.exp(-scale * w) for k, scale in parameters]


FORMULAS = {
    "skyrl_token_mask": skyrl_token_mask,
    "geo_rs_token_mis": geo_rs_token_mis,
    "trust_region_mask": trust_region_mask,
    "areal_behave_cap": areal_behave_cap,
    "areal_geo_mask": areal_geo_mask,
    "kpop": kpop,
    "flash_reinforce": flash_reinforce,
    "m2po": m2po,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "tvpo": tvpo,
    "opsm": opsm,
    "vespo": vespo,
}
DIVIDES_BY_KEPT = {"geo_rs_token_mis", "trust_region_mask", "m2po"}


def times(weights: list[list[float]], advantages: Advantages) -> list[list[float]]:
    return [[w * a for w, a in zip(*pair, strict=True)] for pair in zip(weights, advantages, strict=True)]


@pytest.mark.parametrize("name", FORMULAS)
@given(seed=SEEDS, per_token=st.booleans())
def test_a_recipe_weighs_as_its_source_does(name, seed, per_token):
    rows, advantages = random_batch(seed, per_token)
    trainer, rollout, mask = padded(rows)
    given_advantages = advantages if per_token else [row[0] if row else 0.0 for row in advantages]
    found = correct(trainer, rollout, mask, preset(name), advantages=given_advantages)
    wanted, weights = FORMULAS[name](rows, advantages), unpadded(found.weights, rows)
    if preset(name).needs_advantages:
        # a token without an advantage is in no gradient: sources differ in whether they mask it
        wanted, weights = times(wanted, advantages), times(weights, advantages)
    assert weights == [pytest.approx(row, rel=1e-9, abs=1e-300) for row in wanted]
    kept = sum(weight != 0 for weight in flat(wanted))
    assert found.denominator == (max(kept, 1) if name in DIVIDES_BY_KEPT else len(flat(wanted)))


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "vespo"])
def test_random_batches_have_tokens_on_both_sides(name):
    weights = [flat(FORMULAS[name](*random_batch(seed, per_token=False))) for seed in range(200)]
    assert {weight == 0 for weight in flat(weights)} == {True, False}


@given(seed=SEEDS)
def test_binary_kl_of_fp32_logprobs_is_never_negative(seed):
    rows, _ = random_batch(seed, per_token=False)
    trainer, _, mask = padded(rows)
    found = correct(trainer.float(), (trainer + 1e-7).float(), mask, preset("flash_reinforce"))
    assert found.metrics["rollout_corr/rollout_rs_seq_mean_binary_kl_min"] >= 0


def test_rejection_metrics_count_what_the_condition_rejects():
    rows = [[(math.log(0.9), math.log(0.5))] * 2]  # both beyond the bound, one of them diverging
    found = correct(*padded(rows), preset("dppo_tv"), advantages=[[1.0, -1.0]])
    assert found.mask.tolist() == [[False, True]]
    assert found.metrics["rollout_corr/rollout_rs_token_prob_diff_masked_fraction"] == 0.5
    assert found.metrics["rollout_corr/rollout_rs_token_prob_diff_fraction_high"] == 1.0


@pytest.mark.parametrize("name", ["dppo_tv", "opsm", "vespo"])
def test_a_recipe_without_its_advantages_is_refused(name):
    with pytest.raises(ValueError, match="give advantages="):
        correct([[-1.0]], [[-1.0]], correction=preset(name))


@pytest.mark.parametrize("advantages", [torch.tensor([1.0, -1.0]), torch.tensor([[1.0], [-1.0]]), [1.0, -1.0],
                                        torch.tensor([[1.0, 1.0], [-1.0, math.nan]]), [[1, 1], [-1]]])  # fmt: skip
def test_advantages_of_every_form_give_the_same(advantages):
    logprobs = [[-1.0, -2.0], [-1.0]], [[-1.5, -2.0], [-0.5]]
    found = correct(*logprobs, correction=Correction(GammaWeights()), advantages=advantages)
    w = math.exp(0.5), math.exp(-0.5)
    wanted = [math.exp(3) * w[0] ** 2 * math.exp(-3 * w[0])] * 2, [math.exp(2) * w[1] ** 3 * math.exp(-2 * w[1]), 0]
    assert found.weights.tolist() == [pytest.approx(row) for row in wanted]


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        (torch.ones(3), r"advantages \[3, 1\] do not match the batch \[1, 2\]"),
        (torch.ones(1, 3), "do not match the batch"),
        ([[1.0]], r"advantages\[0, 1\] is nan"),
        ([math.inf], r"advantages\[0, 0\] is inf"),
    ],
)
def test_advantages_that_do_not_fit_are_refused(advantages, message):
    with pytest.raises(ValueError, match=message):
        correct([[-1.0, -2.0]], [[-1.0, -2.0]], advantages=advantages)
