"""What a loss is divided by: the gradient of each recipe, against its source's formula written out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.correction import PRESETS, Correction, Rejection, correct, preset
from tests.unit.correction.batches import ROWS, apply, padded
from tests.unit.correction.expected import Rows

NINE_OF_TEN_REJECTED: Rows = [[(-1.0, -1.0)] * 4, *[[(-3.0, -1.0)] * 4] * 9]


def gradient(rows: Rows, recipe: Correction) -> torch.Tensor:
    """Of the loss as docs/correction.md has it, by the trainer's logprobs [batch, tokens], advantages of 1."""
    trainer, rollout, mask = padded(rows, padding=0.0)
    trainer.requires_grad_()
    corrected = apply(trainer.detach(), rollout, mask, recipe)
    (-(corrected.weights * trainer).sum() / corrected.denominator).backward()
    assert trainer.grad is not None
    return trainer.grad


@given(rows=ROWS, name=st.sampled_from(list(PRESETS)))
def test_the_gradient_is_the_weights_over_the_counted_tokens(rows, name):
    trainer, rollout, mask = padded(rows)
    corrected = apply(trainer, rollout, mask, preset(name))
    counted = mask if preset(name).divides_by == "sampled" else corrected.mask
    tokens = sum(map(len, rows)) if preset(name).divides_by == "sampled" else int(corrected.mask.sum())
    assert torch.equal(corrected.counted, counted)
    assert corrected.denominator == max(tokens, 1)
    torch.testing.assert_close(gradient(rows, preset(name)), -corrected.weights / max(tokens, 1))


@given(rows=ROWS)
def test_both_denominators_reject_and_weigh_alike(rows):
    rejection = (Rejection("seq_mean_k3", 0.01),)
    sampled = correct(*padded(rows), Correction(rejections=rejection, divides_by="sampled"))
    kept = correct(*padded(rows), Correction(rejections=rejection, divides_by="kept"))
    assert torch.equal(sampled.mask, kept.mask) and torch.equal(sampled.weights, kept.weights)
    assert sampled.metrics == kept.metrics
    assert sampled.denominator == sum(map(len, rows)) >= kept.denominator


@pytest.mark.parametrize("divides_by", ["sampled", "kept"])
def test_a_batch_that_is_rejected_whole_is_divided_by_something(divides_by):
    recipe = Correction(rejections=(Rejection("token_k1", 1.1),), divides_by=divides_by)
    found = correct([[-9.0, -9.0]], [[-1.0, -1.0]], correction=recipe)
    assert found.denominator == {"sampled": 2, "kept": 1}[divides_by]


def test_the_parts_of_a_step_add_up_to_the_whole():
    whole = correct(*padded(NINE_OF_TEN_REJECTED), preset("geo_rs"))
    parts = [correct(*padded(NINE_OF_TEN_REJECTED[i : i + 5]), preset("geo_rs")) for i in (0, 5)]
    assert sum(int(part.counted.sum()) for part in parts) == whole.denominator == 4


def test_an_unknown_denominator_is_refused():
    with pytest.raises(ValueError, match="divides_by='tokens' must be one of sampled, kept"):
        Correction(divides_by="tokens")


def test_truncated_sampling_makes_a_perfect_version_look_wrong():
    kept = 0.9  # top_p
    trainer = torch.full((1, 200), math.log(0.4), dtype=torch.float64)
    rollout = trainer - math.log(kept)
    found = correct(trainer, rollout, torch.ones(1, 200), preset("seq_tis"))
    assert found.weights.max() == pytest.approx(max(kept**200, math.exp(-20)))
    assert found.metrics["rollout_corr/token_mult_prob_error"] == pytest.approx(1 / kept)
