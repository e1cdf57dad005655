"""Whole recipes: what holds for all of them, whatever the batch, and what a loss is divided by."""

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.correction import (
    PRESETS,
    Corrected,
    Correction,
    ImportanceWeights,
    Rejection,
    Veto,
    correct,
    preset,
)
from tests.unit.correction.batches import ROWS, UNUSABLE, apply, flat, near, padded, ragged, unpadded
from tests.unit.correction.expected import Rows

EVERYTHING = Correction(
    ImportanceWeights("sequence", upper=3.0, lower=0.1, batch_normalize=True),
    (
        Rejection("token_k1", 8.0),
        Rejection("token_k3", 2.0),
        Rejection("seq_mean_k2", 1.0),
        Rejection("seq_max_k3", 4.0),
    ),
    Veto(lower=1e-4, upper=100.0),
)
RECIPES = st.sampled_from([*PRESETS.values(), EVERYTHING])
"""Thresholds lie on no value that the tests sum in another order."""
BY_HAND: Rows = [
    [(math.log(0.31), math.log(0.30)), (math.log(0.5), math.log(0.5)), (math.log(0.097), math.log(0.1))],
    [(math.log(0.6), math.log(0.1)), (math.log(0.9), math.log(0.4))],
    [],
    [(math.log(0.00002), math.log(0.4)), (math.log(0.2), math.log(0.5)), (-1.0, -1.25), (-0.5, -0.375)],
]
"""Four sequences: near, far above, empty, far below; ratios from 0.00005 to 6."""


def assert_same(found: Corrected, wanted: Corrected) -> None:
    assert torch.equal(found.mask, wanted.mask)
    torch.testing.assert_close(found.weights, wanted.weights)
    assert found.metrics == near(wanted.metrics)


@given(rows=ROWS, recipe=RECIPES)
def test_equal_policies_are_left_as_they_are(rows, recipe):
    equal = [[(trainer, trainer) for trainer, _ in row] for row in rows]
    trainer, rollout, mask = padded(equal)
    found = apply(trainer, rollout, mask, recipe)
    assert torch.equal(found.mask, mask)
    assert torch.equal(found.weights, mask.double())
    zero = {"kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "rollout_train_logprobs_abs_diff_max"}
    assert {found.metrics[f"rollout_corr/{name}"] for name in zero} == {0.0}
    assert found.metrics["rollout_corr/ppl_ratio"] == found.metrics["rollout_corr/token_mult_prob_error"] == 1.0
    rejected = [value for name, value in found.metrics.items() if name.endswith("masked_fraction")]
    assert rejected == [0.0] * len(rejected)


@given(
    rows=ROWS,
    recipe=RECIPES,
    seed=st.integers(0, 1000),
    junk=UNUSABLE | st.floats(-100, 100),
    extra=st.integers(0, 3),
)
def test_order_padding_and_sequences_without_tokens_change_nothing(rows, recipe, seed, junk, extra):
    order = [*range(len(rows)), -1]  # -1: one more sequence, which is empty
    random.Random(seed).shuffle(order)
    wanted = apply(*padded([*rows, []]), recipe)
    found = apply(*padded([[*rows, []][index] for index in order], junk, extra), recipe)
    width = wanted.mask.shape[1]
    assert not found.mask[:, width:].any() and not found.weights[:, width:].any()
    found = dataclasses.replace(found, weights=found.weights[:, :width], mask=found.mask[:, :width])
    assert_same(found, dataclasses.replace(wanted, weights=wanted.weights[order], mask=wanted.mask[order]))
    assert wanted.metrics == near(apply(*padded(rows), recipe).metrics)


@settings(max_examples=25)
@given(rows=ROWS, recipe=RECIPES)
def test_ragged_rows_give_what_padded_rows_give(rows, recipe):
    trainer, rollout, mask = padded(rows)
    wanted = apply(trainer, rollout, mask, recipe)
    by_row = ragged(rows)
    assert_same(apply(*by_row, correction=recipe), wanted)
    assert_same(apply(trainer, by_row[1], correction=recipe), wanted)
    assert_same(apply(*by_row, mask, recipe), wanted)


@given(rows=ROWS, recipe=RECIPES)
def test_values_are_finite_and_fractions_lie_between_0_and_1(rows, recipe):
    far = [[(50 * trainer, 50 * rollout) for trainer, rollout in row] for row in rows]  # down to exp(−2000)
    found = apply(*padded(far), recipe)
    assert torch.isfinite(found.weights).all() and (found.weights >= 0).all()
    assert [name for name, value in found.metrics.items() if not math.isfinite(value)] == []
    shares = {name: value for name, value in found.metrics.items() if "fraction" in name or "oob" in name}
    assert [name for name, value in shares.items() if not 0 <= value <= 1] == []


@given(rows=ROWS, recipe=RECIPES)
def test_the_gradient_is_the_weights_over_the_counted_tokens(rows, recipe):
    trainer, rollout, mask = padded(rows, padding=0.0)
    trainer.requires_grad_()
    found = apply(trainer, rollout.requires_grad_(), mask, recipe)
    counted = mask if recipe.divides_by == "sampled" else found.mask
    assert not (found.mask & ~mask).any() and not found.weights[~found.mask].any()
    assert torch.equal(found.counted, counted) and found.denominator == max(int(counted.sum()), 1)
    (-(found.weights * trainer).sum() / found.denominator).backward()  # as docs/correction.md has it
    assert not found.weights.requires_grad and trainer.grad is not None
    torch.testing.assert_close(trainer.grad, -found.weights / found.denominator)


@pytest.mark.parametrize(
    ("trainer", "rollout", "weights"),
    [
        (torch.float16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_logprobs_of_any_dtype_give_weights_of_at_least_fp32(trainer, rollout, weights):
    ours, theirs, mask = padded(BY_HAND)
    ours, theirs = ours.to(trainer), theirs.to(rollout)
    found = apply(ours, theirs, mask, EVERYTHING)
    assert found.weights.dtype is weights and found.mask.dtype is torch.bool
    exact = apply(ours.double(), theirs.double(), mask, EVERYTHING)
    assert found.metrics == exact.metrics
    assert torch.equal(found.weights, exact.weights.to(weights))


@settings(max_examples=25)
@given(rows=ROWS)
def test_a_token_stays_if_every_rejection_and_the_veto_keep_it(rows):
    trainer, rollout, mask = padded(rows)
    alone = [correct(trainer, rollout, mask, Correction(rejections=(one,))).mask for one in EVERYTHING.rejections]
    alone.append(correct(trainer, rollout, mask, Correction(veto=EVERYTHING.veto)).mask)
    together = apply(trainer, rollout, mask, EVERYTHING)
    assert torch.equal(together.mask, torch.stack(alone).all(0))
    kept = flat(unpadded(together.mask, rows))
    lost = [not all(row) for row in unpadded(together.mask, rows) if row]
    assert together.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - sum(kept) / len(kept))
    assert together.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(sum(lost) / len(lost))
    weights_alone = correct(trainer, rollout, mask, Correction(EVERYTHING.weights)).metrics
    assert weights_alone.items() <= together.metrics.items()


def test_the_parts_of_a_step_add_up_to_the_whole():
    nine_of_ten_rejected: Rows = [[(-1.0, -1.0)] * 4, *[[(-3.0, -1.0)] * 4] * 9]
    whole = correct(*padded(nine_of_ten_rejected), preset("geo_rs"))
    parts = [correct(*padded(nine_of_ten_rejected[i : i + 5]), preset("geo_rs")) for i in (0, 5)]
    assert sum(int(part.counted.sum()) for part in parts) == whole.denominator == 4


def test_a_recipe_is_refused_where_it_is_written():
    with pytest.raises(ValueError, match="token_k1 rejects twice"):
        Correction(rejections=(Rejection("token_k1", 2.0), Rejection("token_k2", 1.0), Rejection("token_k1", 3.0)))
    with pytest.raises(ValueError, match="divides_by='tokens' must be one of sampled, kept"):
        Correction(divides_by="tokens")
    with pytest.raises(TypeError, match="tuple of Rejection"):
        Correction(rejections=Rejection("token_k1", 2.0))
    with pytest.raises(TypeError, match="ImportanceWeights"):
        Correction(weights="token")
    with pytest.raises(TypeError, match="Correction"):
        correct([[0.0]], [[0.0]], correction="token_tis")
