"""The same batch under the same recipes gives verl's weights, masks and metrics: curves of both can be compared.

``verl-0.9.1.json`` holds what ``compute_rollout_correction_and_rejection_mask`` of verl 0.9.1 returned in fp64 for
``trainer`` and ``rollout``, with the arguments it was called with; ``weights`` of ``results`` times the mask that it
returned. ``differs`` are batches of which it says something else than we do.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_service.correction import Correction, ImportanceWeights, Rejection, correct

RECORDED = json.loads(Path(__file__).with_name("verl-0.9.1.json").read_text())


def bounds(written: Any) -> tuple[float, float | None]:
    """verl's ``upper`` or ``lower_upper`` as upper and lower."""
    *lower, upper = (float(bound) for bound in str(written).split("_"))
    return upper, lower[0] if lower else None


def ours(arguments: dict[str, Any]) -> Correction:
    """verl's arguments as a recipe."""
    upper, lower = bounds(arguments["rollout_is_threshold"])
    normalize = arguments.get("rollout_is_batch_normalize", False)
    outside = "truncate" if lower is None else "mask"
    weights = ImportanceWeights(arguments["rollout_is"], upper, lower, outside, normalize)
    if "rollout_rs" not in arguments:
        return Correction(weights)
    options = zip(arguments["rollout_rs"].split(","), arguments["rollout_rs_threshold"].split(","), strict=True)
    return Correction(weights, tuple(Rejection(name, *bounds(written)) for name, written in options))


@pytest.mark.parametrize("recorded", RECORDED["results"], ids=lambda result: str([*result["arguments"].values()]))
def test_a_recipe_gives_what_verl_gives(recorded):
    found = correct(RECORDED["trainer"], RECORDED["rollout"], correction=ours(recorded["arguments"]))
    assert found.mask.tolist() == [[bool(kept) for kept in row] for row in recorded["mask"]]
    assert found.weights.tolist() == [pytest.approx(row, rel=1e-6) for row in recorded["weights"]]
    # verl divides by count + 1e-8 and takes the variance as a difference of squares; our fp32 is of the lists.
    wanted = {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in recorded["metrics"].items()}
    assert {name: found.metrics[name] for name in wanted} == wanted


OURS: dict[str, tuple[list[list[float]], dict[str, float]]] = {
    "rollout_is_min of sequences is not clamped to e^-20": (
        [[math.exp(-20)] * 2, [math.exp(0.2)] * 2],
        {"rollout_is_max": math.exp(0.2), "rollout_is_min": math.exp(-20)},
    ),
    "rollout_is_min and _max of sequences count one without a token as 1": (
        [[math.exp(1.2)] * 2, [0.0, 0.0]],
        {"rollout_is_max": math.exp(1.2), "rollout_is_min": math.exp(1.2)},
    ),
    "the effective sample size of tiny weights is above 1": (
        [[math.exp(-20)] * 2],
        {"rollout_is_eff_sample_size": 1.0},
    ),
    "a rejected token keeps its weight": ([[1.0, 0.0]], {"rollout_is_mean": (1 + math.exp(-2)) / 2}),
    "a sequence's ratio above e^20 is counted as above an upper bound that is higher still": (
        [[math.exp(20)] * 2],
        {"rollout_is_ratio_fraction_high": 0.0},
    ),
    "NaN in padding is a weight": ([[math.exp(0.5), 0.0]], {"rollout_is_mean": math.exp(0.5)}),
}


@pytest.mark.parametrize("recorded", RECORDED["differs"], ids=lambda result: str(result["what"]))
def test_where_the_page_says_that_we_differ_we_do(recorded):
    logprobs = (torch.tensor(recorded[name], dtype=torch.float64) for name in ("trainer", "rollout", "mask"))
    found = correct(*logprobs, ours(recorded["arguments"]))
    weights, metrics = OURS[recorded["what"]]
    measured = {name: found.metrics[f"rollout_corr/{name}"] for name in metrics}
    assert found.weights.tolist() == [pytest.approx(row, rel=1e-9) for row in weights]
    assert measured == pytest.approx(metrics, rel=1e-9)
    theirs = recorded["weights"], recorded["metrics"]
    same_weights = [pytest.approx(row, rel=1e-6, nan_ok=True) for row in theirs[0]] == found.weights.tolist()
    assert not (same_weights and measured == pytest.approx(theirs[1], rel=1e-6))
