"""What FP8 keys and values cost, and which models it would ruin."""

import math
from itertools import permutations

import pytest
import torch
from transformers import PreTrainedModel

from rollout_service.kv_scales.fp8_error import (
    ErrorSums,
    fp8_round_trip,
    unfit_layers,
    why_unfit,
    worst_errors,
)
from rollout_service.kv_scales.observer import observe_qkv
from rollout_service.kv_scales.scales import LayerScales
from rollout_service.protocol.kv_scales import KVMeasurement, LayerError
from tests.unit.kv_scales.small import small_model, tokens

UNIT = LayerScales(q=1, k=1, v=1)
ALL = torch.ones(2, 12, dtype=torch.bool)


def calibrated_errors(model: PreTrainedModel) -> dict[str, LayerError]:
    with torch.no_grad():
        with observe_qkv(model) as first:
            model(tokens(0))
        with observe_qkv(model, measured_with=first.scales()) as second:
            model(tokens(0))
    return second.errors()


class TestErrorSums:
    @pytest.mark.parametrize("seed", range(40))
    def test_queries_that_do_not_see_the_error_have_none(self, seed):
        generator = torch.Generator().manual_seed(seed)
        k = torch.randn(1, 1, 2, 2, generator=generator) * 30
        error = (fp8_round_trip(k, 1.0) - k).diff(dim=2)  # of two keys, the errors beyond their mean are opposite
        q = torch.stack([-error[..., 1], error[..., 0]], -1)
        sums = ErrorSums(UNIT)
        sums.add(q, k, k, ALL[:1, :1], ALL[:1, :2], 1.0)
        assert sums.result().logit_rms == pytest.approx(0, abs=1e-3)

    def test_the_logit_error_is_that_of_all_pairs(self):
        q, k, v = (torch.randn(2, heads, 12, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 3))
        x = torch.tensor([1.0, 1.0625, 17.0, 448.0, 500.0, -1000.0])
        assert fp8_round_trip(x, 1.0).tolist() == [1.0, 1.0, 16.0, 448.0, 448.0, -448.0]
        assert fp8_round_trip(x, 2.0)[-1] == -896
        counts = ALL.clone()
        counts[0, 7:] = False
        sums = ErrorSums(UNIT)
        sums.add(q, k, v[:, :2], counts, counts, 0.25)
        pairs = []
        for row in range(2):
            kept = counts[row]
            for head in range(4):
                keys = k[row, head // 2, kept]
                wrong = fp8_round_trip(keys, 1.0) - keys
                pairs.append((0.25 * q[row, head, kept] @ (wrong - wrong.mean(0)).T).flatten())
        assert sums.result().logit_rms == pytest.approx(float(torch.cat(pairs).square().mean().sqrt()), rel=1e-4)


class TestUnfitLayers:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
    def test_fp8_is_accurate_enough_for_ordinary_models(self, family):
        errors = calibrated_errors(small_model(family))
        assert unfit_layers(errors) == {}
        for error in errors.values():
            assert error.k_saturated == error.v_saturated == 0
            assert 0.015 < error.k_relative < 0.04
            assert 0.015 < error.v_channel_relative < 0.04

    def test_keys_beyond_448_saturate_with_unit_scales_alone(self):
        k = 300 * torch.randn(2, 2, 12, 16, generator=torch.Generator().manual_seed(0))
        amax = float(k.abs().max())
        unit, calibrated = ErrorSums(UNIT), ErrorSums(LayerScales(q=1, k=amax / 448, v=1))
        for sums in (unit, calibrated):
            sums.add(k * 1e-5, k, k * 0.01, ALL, ALL, 0.25)
        assert unit.result().k_saturated == pytest.approx(float((k.abs() > 448).double().mean()))
        assert list(unfit_layers({"l": unit.result()})) == ["l"]
        assert unfit_layers({"l": calibrated.result()}) == {}

    def test_tiny_channels_beside_huge_ones_are_lost_with_any_scale(self):
        k = 1e-4 * torch.randn(2, 2, 12, 16, generator=torch.Generator().manual_seed(0))
        k[..., 0] = 500
        for scale in (500 / 448, 1.0, 0.1):
            sums = ErrorSums(LayerScales(q=1, k=scale, v=1))
            sums.add(k, k, k, ALL, ALL, 0.25)
            assert sums.result().k_channel_relative > 0.5
            assert "k_channel_relative" in unfit_layers({"model.layers.7": sums.result()})["model.layers.7"]

    def test_a_large_bias_without_qk_norm_is_refused_by_its_logits(self):
        model = small_model("qwen2")
        with torch.no_grad():
            attention = model.model.layers[1].self_attn
            attention.k_proj.bias[::8] = 300
            attention.q_proj.bias[::8] = 10
        errors = calibrated_errors(model)
        assert list(unfit_layers(errors)) == ["model.layers.1.self_attn"]
        assert errors["model.layers.1.self_attn"].k_relative < 0.04  # which would not have told

    def test_five_layers_are_named_and_the_others_counted(self):
        unfit = {f"l.{number}": "why" for number in range(7)}
        words = why_unfit(unfit, len(unfit) + 1)
        assert words.startswith(
            "FP8 is not accurate enough for the keys and values of 7 of 8 layers: l.0: why; l.1: why;"
        )
        assert words.endswith("l.4: why, and 2 more") and "l.5" not in words
        assert why_unfit({"l.0": "why"}, 1).endswith(": l.0: why")


FIELDS = tuple(LayerError.model_fields)


def rank(*errors: float, layer: str = "l.0") -> KVMeasurement:
    """With one error for each field."""
    return KVMeasurement(
        amax={layer: ((1.0, 1.0, 1.0),)},
        errors={layer: LayerError(**dict(zip(FIELDS, errors, strict=True)))},
        tokens=1,
    )


class TestRanks:
    @pytest.mark.parametrize("order", list(permutations([0.1, math.nan, 0.2])), ids=str)
    def test_each_error_is_that_of_the_rank_where_it_is_largest_or_nan(self, order):
        rising, falling = rank(*range(7)), rank(*reversed(range(7)))
        [(layer, worst)] = worst_errors([rising, falling]).items()
        assert layer == "l.0" and [getattr(worst, name) for name in FIELDS] == [6, 5, 4, 3, 4, 5, 6]
        worst = worst_errors([rank(error, *[0.0] * 6) for error in order])["l.0"]
        assert math.isnan(worst.k_saturated) and worst.v_saturated == 0

    def test_a_measurement_survives_the_way_out_of_a_worker(self):
        measured = rank(math.nan, math.inf, *[0.5] * 5)
        again = KVMeasurement.model_validate(measured.model_dump(mode="json"))
        assert repr(again) == repr(measured)
