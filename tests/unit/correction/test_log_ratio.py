"""What both weights and statistics refuse, and what they say."""

import math
from collections.abc import Callable

import pytest
import torch

from rollout_service.correction import measure_mismatch, truncated_importance_weights

both = pytest.mark.parametrize("function", [truncated_importance_weights, measure_mismatch])
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


@both
@pytest.mark.parametrize(
    "shapes",
    [((2, 3), (2, 4), (2, 3)), ((2, 3), (2, 3), (3,)), ((2, 3), (2, 3), (2, 1)), ((3,), (3,), (3,))],
    ids=["logprobs differ", "mask lacks the batch", "mask would broadcast", "no batch"],
)
def test_shapes_that_are_not_one_batch_by_tokens_are_refused_with_all_three(
    function: Function, shapes: tuple[tuple[int, ...], ...]
) -> None:
    trainer, engine, mask = (torch.ones(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"\[batch, tokens\]") as refusal:
        function(trainer, engine, mask)
    assert all(str(list(shape)) in str(refusal.value) for shape in shapes)


@both
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_a_mask_that_selects_nothing_is_refused(function: Function, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="selects no token"):
        function(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape))


@both
@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, math.nan])
def test_a_mask_of_anything_but_zero_and_one_is_refused(function: Function, value: float) -> None:
    with pytest.raises(ValueError, match="only 0 and 1"):
        function(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, value]]))


@both
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["trainer_logprobs", "rollout_logprobs"])
def test_a_selected_logprob_that_is_not_finite_is_refused_with_its_place(
    function: Function, value: float, name: str
) -> None:
    logprobs = {"trainer_logprobs": torch.zeros(2, 3), "rollout_logprobs": torch.zeros(2, 3)}
    logprobs[name][1, 2] = value
    with pytest.raises(ValueError, match=rf"{name}\[1, 2\] is {value}"):
        function(logprobs["trainer_logprobs"], logprobs["rollout_logprobs"], torch.ones(2, 3))
