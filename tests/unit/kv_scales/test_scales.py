"""From largest absolute values to scales, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_service.errors import InvalidRequest
from rollout_service.kv_scales import LayerScales, scales_from_amax
from rollout_service.kv_scales.fp8_error import fp8_round_trip
from rollout_service.kv_scales.scales import MARGIN, largest_of_ranks, next_power_of_two

ONE = {"layers.0": [[448.0, 896.0, 4.48]]}


class TestScale:
    def test_a_scale_is_rounded_up_to_a_power_of_two(self):
        scales = scales_from_amax([ONE])
        assert scales.layers["layers.0"] == LayerScales(q=2, k=4, v=1 / 64)
        assert [next_power_of_two(s) for s in (1.0, 1.0000001, 2.0, 0.24, 0.25, 448.0)] == [1, 2, 2, 0.25, 0.25, 512]

    def test_a_power_of_two_leaves_the_codes_of_ordinary_values(self):
        x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).clamp(min=2**-6)
        scale = scales_from_amax([{"l.0": [[float(x.max())] * 3]}]).layers["l.0"].k
        assert scale < 1 and torch.equal(fp8_round_trip(x, scale), fp8_round_trip(x, 1.0))

    @given(amax=st.lists(st.floats(1e-30, 1e30), min_size=3, max_size=3))
    def test_the_largest_value_never_saturates(self, amax):
        scales = scales_from_amax([{"l.0": [amax]}]).layers["l.0"]
        for largest, scale in zip(amax, (scales.q, scales.k, scales.v), strict=True):
            assert largest <= 448 * scale * (1 + 1e-15)  # rounding of fp64 alone
            assert math.frexp(scale)[0] == 0.5 and scale < 2 * MARGIN * largest / 448 * (1 + 1e-15)


class TestRanks:
    def test_the_largest_rank_counts_and_ranks_may_hold_other_layers(self):
        ranks = [{"l.2": torch.tensor([[1.0, 5.0, 1.0]])}, {"l.2": [[2.0, 3.0, 1.0]], "l.10": [[1.0, 1.0, 1.0]]}]
        largest = largest_of_ranks(ranks)
        assert list(largest) == ["l.2", "l.10"] and largest["l.2"].tolist() == [2, 5, 1]


class TestRefused:
    def test_what_gives_no_scale_is_refused(self):
        for bad in (math.nan, math.inf):
            with pytest.raises(InvalidRequest, match=r"l\.0: .*1 of 2000 micro-batches"):
                scales_from_amax([{"l.0": [[1.0, 1.0, 1.0]] * 1999 + [[1.0, bad, 1.0]]}])
        with pytest.raises(InvalidRequest, match=r"zero throughout.*l\.0\.v"):
            scales_from_amax([{"l.0": [[1.0, 1.0, 0.0]]}])
        with pytest.raises(InvalidRequest, match="forward pass"):
            scales_from_amax([{}])
        with pytest.raises(InvalidRequest, match=r"\[3\]"):
            scales_from_amax([{"l.0": [1.0, 1.0, 1.0]}])


class TestScales:
    def test_a_scale_is_positive_and_finite(self):
        for bad in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ValidationError):
                LayerScales(q=1, k=bad, v=1)

    def test_scales_of_another_model_name_what_does_not_fit(self):
        scales = scales_from_amax([ONE])
        assert list(scales.named()) == [f"layers.0.{x}_scale" for x in "qkv"]
        scales.require_layers(["layers.0"])
        with pytest.raises(InvalidRequest, match=r"missing \['layers.1'\], unknown \['layers.0'\]"):
            scales.require_layers(["layers.1"])
