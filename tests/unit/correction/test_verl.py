"""The same batch under the same recipes gives verl's weights, masks and metrics: curves of both can be compared.

``verl-0.9.1.json`` holds what ``compute_rollout_correction_and_rejection_mask`` of verl 0.9.1 returned in fp64 for
``trainer`` and ``rollout``, with the arguments it was called with.
"""

import json
from pathlib import Path
from typing import Any

import pytest

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
def test_a_recipe_gives_what_verl_gives(recorded: dict[str, Any]) -> None:
    found = correct(RECORDED["trainer"], RECORDED["rollout"], correction=ours(recorded["arguments"]))
    assert found.mask.tolist() == [[bool(kept) for kept in row] for row in recorded["mask"]]
    assert found.weights.tolist() == [pytest.approx(row, rel=1e-6) for row in recorded["weights"]]
    # verl divides by count + 1e-8 and takes the variance as a difference of squares; our fp32 is of the lists.
    wanted = {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in recorded["metrics"].items()}
    assert {name: found.metrics[name] for name in wanted} == wanted
