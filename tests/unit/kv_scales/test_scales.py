"""From largest absolute values to scales, by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_service.errors import InvalidRequest
from rollout_service.kv_scales import LayerScales, ScaledFrom, scales_from_amax
from rollout_service.kv_scales.fp8_error import fp8_round_trip
from rollout_service.kv_scales.scales import (
    layer_scales,
    next_power_of_two,
    percentile_over_micro_batches,
)

ONE = {"layers.0": [[448.0, 896.0, 4.48]]}


class TestScale:
    def test_a_scale_is_amax_times_margin_over_448(self) -> None:
        scales = scales_from_amax([ONE], how=ScaledFrom(power_of_two=False))
        assert scales.layers["layers.0"] == LayerScales(q=1.05, k=2 * 1.05, v=4.48 * 1.05 / 448)

    def test_then_it_is_rounded_up_to_a_power_of_two(self) -> None:
        scales = scales_from_amax([ONE])
        assert scales.layers["layers.0"] == LayerScales(q=2, k=4, v=1 / 64)
        assert [next_power_of_two(s) for s in (1.0, 1.0000001, 2.0, 0.24, 0.25, 448.0)] == [1, 2, 2, 0.25, 0.25, 512]

    def test_a_power_of_two_leaves_the_codes_of_ordinary_values(self) -> None:
        x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).clamp(min=2**-6)
        amax = [[float(x.max())] * 3]
        scale = scales_from_amax([{"l.0": amax}]).layers["l.0"].k
        exact = scales_from_amax([{"l.0": amax}], how=ScaledFrom(power_of_two=False)).layers["l.0"].k
        assert scale < 1 and torch.equal(fp8_round_trip(x, scale), fp8_round_trip(x, 1.0))
        assert not torch.equal(fp8_round_trip(x, exact), fp8_round_trip(x, 1.0))

    @given(
        amax=st.lists(st.floats(1e-30, 1e30), min_size=3, max_size=3),
        margin=st.floats(1, 10),
        power_of_two=st.booleans(),
    )
    def test_with_a_margin_the_largest_value_never_saturates(
        self, amax: list[float], margin: float, power_of_two: bool
    ) -> None:
        scales = layer_scales({"l.0": amax}, ScaledFrom(margin=margin, power_of_two=power_of_two))["l.0"]
        for largest, scale in zip(amax, (scales.q, scales.k, scales.v), strict=True):
            assert largest <= 448 * scale * (1 + 1e-15)  # rounding of fp64 alone
            if power_of_two:
                assert math.frexp(scale)[0] == 0.5 and scale < 2 * margin * largest / 448 * (1 + 1e-15)
            else:
                assert scale == pytest.approx(margin * largest / 448, rel=1e-12)


class TestPercentile:
    def test_the_percentile_is_nemo_rls(self) -> None:
        """``round(p / 100 · (n − 1))`` of the sorted values, as its ``_percentile`` has it; halves go to even."""
        amax = np.arange(1.0, 11.0)[::-1, None]
        percentiles = (1, 5, 6, 10, 50, 90, 94, 95, 99.9, 100)
        assert [percentile_over_micro_batches(amax, p)[0] for p in percentiles] == [1, 1, 2, 2, 5, 9, 9, 10, 10, 10]
        assert percentile_over_micro_batches([[3.0, 1.0]], 50).tolist() == [3.0, 1.0]

    @pytest.mark.parametrize(("micro_batches", "taken"), [(1, 1), (500, 500), (501, 501), (502, 501), (1000, 999)])
    def test_of_501_micro_batches_the_default_takes_the_largest(self, micro_batches: int, taken: int) -> None:
        amax = np.arange(1.0, micro_batches + 1)[:, None]
        assert percentile_over_micro_batches(amax, ScaledFrom().percentile).tolist() == [taken]


class TestRanks:
    def test_the_largest_rank_counts_and_ranks_may_hold_other_layers(self) -> None:
        ranks = [{"l.2": torch.tensor([[1.0, 5.0, 1.0]])}, {"l.2": [[2.0, 3.0, 1.0]], "l.10": [[1.0, 1.0, 1.0]]}]
        scales = scales_from_amax(ranks, how=ScaledFrom(margin=448))
        assert list(scales.layers) == ["l.2", "l.10"]
        assert scales.layers["l.2"] == LayerScales(q=2, k=8, v=1)


class TestRefused:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_one_pass_with_nan_or_infinity_is_refused_by_layer(self, bad: float) -> None:
        with pytest.raises(InvalidRequest, match=r"l\.0: .*1 of 2000 micro-batches"):
            scales_from_amax([{"l.0": [[1.0, 1.0, 1.0]] * 1999 + [[1.0, bad, 1.0]]}])

    def test_what_gives_no_scale_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match=r"zero throughout.*l\.0\.v"):
            scales_from_amax([{"l.0": [[1.0, 1.0, 0.0]]}])
        with pytest.raises(InvalidRequest, match="forward pass"):
            scales_from_amax([{}])
        with pytest.raises(InvalidRequest, match=r"\[3\]"):
            scales_from_amax([{"l.0": [1.0, 1.0, 1.0]}])


class TestScales:
    def test_the_names_are_those_of_a_checkpoint(self) -> None:
        assert list(scales_from_amax([ONE]).named()) == [f"layers.0.{x}_scale" for x in "qkv"]

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
    def test_a_scale_is_positive_and_finite(self, bad: float) -> None:
        with pytest.raises(ValidationError):
            LayerScales(q=1, k=bad, v=1)

    def test_scales_of_another_model_name_what_does_not_fit(self) -> None:
        scales = scales_from_amax([ONE])
        scales.require_layers(["layers.0"])
        with pytest.raises(InvalidRequest, match=r"missing \['layers.1'\], unknown \['layers.0'\]"):
            scales.require_layers(["layers.1"])
