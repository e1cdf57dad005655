"""What is refused, and what is said; ragged rows; missing logprobs."""

import math

import pytest
import torch

from rollout_service.correction import correct, measure_mismatch, preset, truncated_importance_weights
from rollout_service.correction.ratios import _padded

LOST = [[-1.0, math.nan, -2.0], [-math.inf, -1.0]]
TRAINER = [[-1.5, -0.5, -2.0], [-0.5, -1.0]]
ONE, TWO = [[-1.0], [-1.0]], [[-1.0, -2.0], [-1.0]]
ZEROS, ONES = torch.zeros(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((ZEROS, torch.zeros(2, 4), ONES), r"\[batch, tokens\], not \[2, 3\], \[2, 4\] and \[2, 3\]"),
        ((ZEROS, ZEROS, torch.ones(3)), r"\[batch, tokens\], not \[2, 3\], \[2, 3\] and \[3\]"),
        ((ZEROS, ZEROS, torch.ones(2, 1)), r"\[2, 1\]"),
        ((torch.zeros(3),) * 3, r"not \[3\], \[3\] and \[3\]"),
        *[((torch.zeros(shape),) * 3, "selects no token") for shape in ((2, 3), (0, 3), (2, 0))],
        *[
            ((torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, value]])), "only 0 and 1")
            for value in (0.5, 2.0, -1.0, math.nan)
        ],
        ((ZEROS.where(ONES.tril(1) > 0, math.nan), ZEROS, ONES), r"trainer_logprobs\[0, 2\] is nan"),
        ((ZEROS, ZEROS.where(ONES.tril(1) > 0, -math.inf), ONES), r"rollout_logprobs\[0, 2\] is -inf"),
        ((TWO, TWO, torch.ones(2, 2)), r"trainer_logprobs\[1, 1\] is nan"),
        ((TWO, [*TWO[:1], [-1.0, -1.0]]), "row 1 of rollout_logprobs has 2 tokens and of trainer_logprobs 1"),
        ((ONE, ONE, [[1]]), "mask has 1 rows and trainer_logprobs has 2"),
        (([torch.zeros(1, 2)], [torch.zeros(1)]), r"1-D \[tokens\], not \[1, 2\]"),
        ((torch.zeros(1, 1), [[-1.0, -1.0]]), r"\[1, 1\], \[1, 2\]"),
        ((torch.zeros(1, 1), torch.zeros(1, 1)), "give a mask"),
        *[((rows, rows), "selects no token") for rows in ([], [[]], [[], []])],
    ],
)
def test_rows_that_do_not_fit_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        correct(*arguments)


@pytest.mark.parametrize("function", [truncated_importance_weights, measure_mismatch])
def test_every_function_refuses_them(function):
    with pytest.raises(ValueError, match="selects no token"):
        function(ZEROS, ZEROS, ZEROS)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_the_mask_may_have_any_dtype(mask_dtype):
    mask = torch.tensor([[1, 0, 1]]).to(mask_dtype)
    assert correct(torch.zeros(1, 3), torch.zeros(1, 3), mask).weights.tolist() == [[1.0, 0.0, 1.0]]


def test_lists_of_numbers_are_tokens_at_the_start_of_their_rows():
    weights = truncated_importance_weights([[-1.0, -2.0], [], [-1.0]], [[-1.0, -1.0], [], [0.0]])
    assert weights.dtype is torch.float32
    assert weights.tolist() == [pytest.approx(row) for row in ([1, math.exp(-1)], [0, 0], [math.exp(-1), 0])]


def test_the_services_lists_go_with_a_trainers_padded_tensor():
    trainer = torch.tensor([[-1.0, -2.0, math.nan, math.nan], [-1.0, math.nan, math.nan, math.nan]])
    assert measure_mismatch(trainer, [[-1.0, -1.0], [-1.0]]).tokens == 3


@pytest.mark.parametrize("mask", [[[1, 0], [1]], torch.tensor([[True, False], [True, False]])])
def test_a_mask_picks_tokens_of_ragged_rows(mask):
    assert measure_mismatch([[-1.0, -9.0], [-2.0]], [[-1.0, -1.0], [-1.0]], mask).k1 == pytest.approx(0.5)


def test_a_missing_logprob_of_ratio_1_weighs_1():
    found = correct(TRAINER, LOST, correction=preset("token_tis"), missing_logprobs="ratio_1")
    assert found.weights.tolist() == [pytest.approx(row) for row in ([math.exp(-0.5), 1, 1], [1, 1, 0])]
    assert found.denominator == 5
    assert found.metrics["rollout_corr/rollout_missing_fraction"] == pytest.approx(2 / 5)
    assert found.metrics["rollout_corr/kl"] == pytest.approx(0.5 / 5)


def test_a_masked_missing_logprob_is_as_if_never_sampled():
    found = correct(TRAINER, LOST, correction=preset("token_tis"), missing_logprobs="mask")
    wanted = correct(TRAINER, [[-1.0, 0, -2.0], [0, -1.0]], [[1, 0, 1], [0, 1]], preset("token_tis"))
    assert torch.equal(found.weights, wanted.weights) and torch.equal(found.mask, wanted.mask)
    assert found.denominator == wanted.denominator == 3
    assert found.metrics == wanted.metrics | {"rollout_corr/rollout_missing_fraction": pytest.approx(2 / 5)}


@pytest.mark.parametrize("missing", ["ratio_1", "mask"])
def test_only_the_rollouts_logprobs_may_be_missing(missing):
    with pytest.raises(ValueError, match=r"trainer_logprobs\[0, 1\] is nan"):
        correct(LOST, TRAINER, missing_logprobs=missing)
    with pytest.raises(ValueError, match=r"rollout_logprobs\[1, 1\] is nan"):  # beyond the end of a ragged row
        correct(torch.zeros(2, 2), [[-1.0, -2.0], [-1.0]], torch.ones(2, 2), missing_logprobs=missing)


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [("mask", "no sampled token has a finite logprob"), ("drop", "'drop' must be one of refuse, ratio_1, mask")],
)
def test_missing_logprobs_that_leave_nothing_are_refused(missing, complaint):
    with pytest.raises(ValueError, match=complaint):
        correct([[-1.0]], [[math.nan]], missing_logprobs=missing)


def test_rows_on_other_devices_follow_the_trainer():
    # the meta device stands for a GPU, and has no values to compute with
    on_gpu = torch.zeros(2, 3, device="meta")
    for rollout in (ZEROS, [[-1.0], [-1.0, -2.0]]):
        assert {each.device for each in _padded(on_gpu, rollout, ONES)} == {on_gpu.device}
