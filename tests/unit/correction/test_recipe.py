"""Whole recipes: what holds for all of them, whatever the batch."""

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import PRESETS, Corrected, Correction, ImportanceWeights, Rejection, Veto, correct
from tests.unit.correction.batches import ROWS, UNUSABLE, apply, flat, near, padded, ragged, unpadded

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


@given(rows=ROWS, recipe=RECIPES, seed=st.integers(0, 1000))
def test_the_order_of_the_sequences_changes_nothing(rows, recipe, seed):
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    straight = apply(*padded(rows), recipe)
    shuffled = apply(*padded([rows[index] for index in order]), recipe)
    assert_same(shuffled, dataclasses.replace(straight, weights=straight.weights[order], mask=straight.mask[order]))


@given(rows=ROWS, recipe=RECIPES, junk=UNUSABLE | st.floats(-100, 100), extra=st.integers(0, 3))
def test_what_masked_positions_hold_has_no_influence(rows, recipe, junk, extra):
    found = apply(*padded(rows, junk, extra), recipe)
    wanted = apply(*padded(rows, 0.0), recipe)
    width = wanted.mask.shape[1]
    assert not found.mask[:, width:].any() and not found.weights[:, width:].any()
    assert_same(dataclasses.replace(found, weights=found.weights[:, :width], mask=found.mask[:, :width]), wanted)


@given(rows=ROWS, recipe=RECIPES, where=st.integers(0, 5))
def test_a_sequence_without_tokens_changes_nothing(rows, recipe, where):
    where = min(where, len(rows))
    found = apply(*padded([*rows[:where], [], *rows[where:]]), recipe)
    wanted = apply(*padded(rows), recipe)
    others = [index for index in range(len(rows) + 1) if index != where]
    assert not found.mask[where].any() and not found.weights[where].any()
    assert_same(dataclasses.replace(found, weights=found.weights[others], mask=found.mask[others]), wanted)


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
def test_rejected_tokens_weigh_zero_and_the_rest_is_in_the_mask(rows, recipe):
    trainer, rollout, mask = padded(rows)
    found = apply(trainer, rollout, mask, recipe)
    assert not (found.mask & ~mask).any()
    assert not found.weights[~found.mask].any()


@pytest.mark.parametrize("recipe", [*PRESETS.values(), EVERYTHING], ids=[*PRESETS, "everything"])
def test_no_gradient_flows_through_weights_or_metrics(recipe):
    trainer = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    found = apply(trainer, torch.tensor([[-1.0001, -2.0]], requires_grad=True), torch.ones(1, 2), recipe)
    assert not found.weights.requires_grad
    (found.weights * trainer).sum().backward()
    assert trainer.grad is not None
    assert torch.equal(trainer.grad, found.weights)


@pytest.mark.parametrize(
    ("trainer", "rollout", "weights"),
    [
        (torch.float16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_logprobs_of_any_dtype_give_weights_of_at_least_fp32(rows, trainer, rollout, weights):
    ours, theirs, mask = padded(rows)
    ours, theirs = ours.to(trainer), theirs.to(rollout)
    found = apply(ours, theirs, mask, EVERYTHING)
    assert found.weights.dtype is weights and found.mask.dtype is torch.bool
    exact = apply(ours.double(), theirs.double(), mask, EVERYTHING)
    assert found.metrics == exact.metrics
    assert torch.equal(found.weights, exact.weights.to(weights))


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


def test_metrics_of_weights_do_not_depend_on_what_is_rejected(rows):
    weights = ImportanceWeights("token", upper=2.0)
    alone = apply(*padded(rows), Correction(weights)).metrics
    assert alone.items() <= apply(*padded(rows), Correction(weights, (Rejection("seq_mean_k3", 0.01),))).metrics.items()


def test_a_recipe_is_refused_where_it_is_written():
    with pytest.raises(ValueError, match="token_k1 rejects twice"):
        Correction(rejections=(Rejection("token_k1", 2.0), Rejection("token_k2", 1.0), Rejection("token_k1", 3.0)))
    with pytest.raises(TypeError, match="tuple of Rejection"):
        Correction(rejections=Rejection("token_k1", 2.0))
    with pytest.raises(TypeError, match="ImportanceWeights"):
        Correction(weights="token")
    with pytest.raises(TypeError, match="Correction"):
        correct([[0.0]], [[0.0]], correction="token_tis")
