"""What scales become of a measurement, by hand; ``Calibrating`` divides by 448 and does no more unless told to."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kv_scales.measured import LAYER, Calibrating, measured, scales_of

NAN, INF = float("nan"), float("inf")
BEFORE = measured((448, 448, 448))
"""Scales of 1."""

Start = Callable[..., Calibrating]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Start:
    return lambda **calibration: Calibrating(tmp_path / "log", model, **calibration)


def k_scales(ingest: Calibrating, *largest_k: float) -> list[float]:
    """k's scale after each of these versions, in which q and v stay 448."""
    results = [ingest.measure(version, measured((448, k, 448))) for version, k in enumerate(largest_k)]
    assert all(s.scales is not None for s in results)
    assert {(s.scales[f"{LAYER}.q_scale"], s.scales[f"{LAYER}.v_scale"]) for s in results if s.scales} == {(1.0, 1.0)}
    return [s.scales[f"{LAYER}.k_scale"] for s in results if s.scales]


class TestLargestValues:
    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ({"margin": 1.05, "power_of_two": False}, scales_of(1.05, 2.1, 0.525)),
            ({"margin": 1.05, "power_of_two": True}, scales_of(2, 4, 1)),
            ({"margin": 1.0, "power_of_two": True}, scales_of(1, 2, 0.5)),
        ],
        ids=["margin", "margin and power of two", "already powers of two"],
    )
    def test_a_scale_is_amax_times_margin_over_448_rounded_up(
        self, start: Start, how: dict[str, Any], expected: dict[str, float]
    ) -> None:
        result = start(**how).measure(0, measured((448, 896, 224)))
        assert result.scales == pytest.approx(expected, rel=1e-12)

    def test_the_largest_of_all_ranks_and_passes_counts(self, start: Start) -> None:
        ranks = measured((448, 1, 1), (1, 896, 1)), measured((1, 1, 1), (2, 2, 1792))
        result = start().measure(0, *ranks)
        assert result.scales == scales_of(1, 2, 4)
        assert result.largest == {LAYER: (448, 896, 1792)}

    def test_the_percentile_leaves_out_passes_that_stand_alone(self, start: Start) -> None:
        passes = [(448.0, 448.0, 448.0)] * 9 + [(448.0, 44800.0, 448.0)]
        assert start(percentile=90).measure(0, measured(*passes)).scales == scales_of(1, 1, 1)
        assert start(percentile=95).measure(1, measured(*passes)).scales == scales_of(1, 100, 1)

    @given(
        passes=st.lists(st.tuples(*[st.floats(1e-6, 1e9)] * 3), min_size=1, max_size=5),
        margin=st.floats(1, 4),
        power_of_two=st.booleans(),
    )
    @settings(max_examples=50, deadline=None)
    def test_no_value_saturates_with_the_scales_made_of_it(
        self,
        model: Path,
        tmp_path_factory: pytest.TempPathFactory,
        passes: list[tuple[float, float, float]],
        margin: float,
        power_of_two: bool,
    ) -> None:
        ingest = Calibrating(tmp_path_factory.mktemp("log"), model, margin=margin, power_of_two=power_of_two)
        result = ingest.measure(0, measured(*passes))
        assert result.error is None and result.scales is not None
        for values, scale in zip(zip(*passes, strict=True), result.scales.values(), strict=True):
            assert max(values) <= 448 * scale * (1 + 1e-15)  # rounding of fp64 alone
            assert scale <= 2 * margin * max(values) / 448


class TestProgressive:
    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ({"progressive": False}, [2, 1, 4]),
            ({"progressive": True}, [2, 2, 4]),
        ],
        ids=["off", "on"],
    )
    def test_what_came_before_counts_if_progressive(
        self, start: Start, how: dict[str, Any], expected: list[float]
    ) -> None:
        assert k_scales(start(**how), 896, 448, 1792) == pytest.approx(expected, rel=1e-12)

    def test_it_goes_on_over_a_restart(self, start: Start) -> None:
        k_scales(start(progressive=True), 896, 448)
        assert start(progressive=True).measure(2, BEFORE).scales == scales_of(1, 2, 1)

    def test_the_change_since_the_version_before_is_told(self, start: Start) -> None:
        ingest = start()
        ingest.measure(0, BEFORE)
        assert ingest.scales.drift is None
        ingest.measure(1, measured((448, 448, 224)))
        assert ingest.scales.drift == 1.0


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
    def test_it_leaves_the_scales_of_before_and_says_why(
        self, start: Start, passes: tuple[float, float, float], why: str
    ) -> None:
        ingest = start()
        before = ingest.measure(0, measured((896, 896, 896)))
        failed = ingest.measure(1, measured((448, 0, 448), passes))
        assert (failed.scales, failed.largest) == (scales_of(2, 2, 2), before.largest)
        assert failed.error is not None and re.search(why, failed.error)
        assert ingest.measure(2, BEFORE).scales == scales_of(1, 1, 1)

    def test_the_first_one_leaves_the_version_without_scales(self, start: Start) -> None:
        ingest = start()
        failed = ingest.measure(0, measured((0, 0, 0)))
        assert failed.error is not None and (failed.scales, failed.largest) == (None, {})
        assert ingest.lease("b", 0) == failed

    def test_a_layer_that_the_model_does_not_have_is_named(self, start: Start) -> None:
        ingest = start()
        stranger = measured((448, 448, 448))
        elsewhere = "model.layers.7.self_attn"
        amax, errors = {elsewhere: stranger.amax[LAYER]}, {elsewhere: stranger.errors[LAYER]}
        failed = ingest.measure(0, stranger.model_copy(update={"amax": amax, "errors": errors}))
        assert failed.error is not None and f"unknown: {elsewhere}.k_scale" in failed.error
