"""The scales that a measurement gives: the largest value times 1.05 / 448, rounded up to a power of two."""

import re
from pathlib import Path

import pytest

from tests.unit.kv_scales.measured import LAYER, Calibrating, measured, scales_of

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def ingest(model: Path, tmp_path: Path) -> Calibrating:
    return Calibrating(tmp_path / "log", model)


def test_the_largest_of_all_ranks_and_passes_counts(ingest):
    ranks = measured((224, 1, 1), (1, 448, 1)), measured((1, 1, 1), (2, 2, 896))
    assert ingest.measure(0, *ranks).scales == scales_of(1, 2, 4)


class TestFailedMeasurement:
    @pytest.mark.parametrize(
        ("passes", "why"),
        [
            ((448, NAN, 448), f"{LAYER}: q, k or v has NaN or infinity in 1 of 2"),
            ((448, 448, INF), f"{LAYER}: q, k or v has NaN or infinity in 1 of 2"),
            ((0, 0, 0), f"zero throughout.*{LAYER}.k"),
            ((0, 1e-40, 0), f"1 unusable: {LAYER}.k_scale"),
        ],
        ids=["nan", "infinity", "zero", "subnormal"],
    )
    def test_it_leaves_the_scales_of_before_and_says_why(self, ingest, passes, why):
        ingest.measure(0, measured((448, 448, 448)))
        failed = ingest.measure(1, measured((448, 0, 448), passes))
        assert failed.scales == scales_of(2, 2, 2)
        assert failed.error is not None and re.search(why, failed.error)
        assert ingest.measure(2, measured((224, 224, 224))).scales == scales_of(1, 1, 1)

    def test_the_first_one_leaves_the_version_without_scales(self, ingest):
        failed = ingest.measure(0, measured((0, 0, 0)))
        assert failed.error is not None and failed.scales is None
        assert ingest.scales.published(0) == failed

    def test_a_layer_that_the_model_does_not_have_is_named(self, ingest):
        stranger = measured((448, 448, 448))
        elsewhere = "model.layers.7.self_attn"
        amax, errors = {elsewhere: stranger.amax[LAYER]}, {elsewhere: stranger.errors[LAYER]}
        failed = ingest.measure(0, stranger.model_copy(update={"amax": amax, "errors": errors}))
        assert failed.error is not None and f"unknown: {elsewhere}.k_scale" in failed.error
