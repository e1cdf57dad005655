"""The torch reference is the specification: here it is held against the formula computed a second way."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given

from rollout_service.errors import QuantizationError
from rollout_service.quant.blockwise import (
    BLOCK,
    are_finite,
    dequantize_blockwise,
    quantize_blockwise,
    require_finite,
    scale_shape,
)
from tests.support.matrices import weights
from tests.unit.quant import e4m3


def assert_as_specified(weight: torch.Tensor) -> None:
    codes, scales = quantize_blockwise(weight)
    expected_codes, expected_scales = e4m3.quantize(weight.float().numpy())
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == weight.shape and codes.is_contiguous()
    assert scales.dtype == torch.float32 and tuple(scales.shape) == scale_shape(tuple(weight.shape))
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected_codes)


class TestFormat:
    def test_torch_decodes_all_256_codes_as_the_format_specifies(self):
        read = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
        for code, value in enumerate(read):
            expected = e4m3.value_of(code)
            assert (expected is None and value != value) or Fraction(value) == expected, code

    def test_every_code_value_comes_back_as_its_own_code(self):
        weight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        finite = weight[~weight.isnan()].view(2, 127)
        codes, scales = quantize_blockwise(finite)
        assert scales.tolist() == [[1.0]]
        assert codes.view(torch.uint8).flatten().tolist() == [c for c in range(256) if c & 0x7F != e4m3.NAN_CODE]

    def test_a_value_halfway_between_two_codes_goes_to_the_even_one(self):
        halves = [(low + high) / 2 for low, high in pairwise(e4m3.POSITIVE)]
        weight = torch.tensor([[448.0, *map(float, halves)]])
        codes, scales = quantize_blockwise(weight)
        assert scales.item() == 1.0
        got = codes.view(torch.uint8)[0, 1:].tolist()
        assert got == [e4m3.nearest_code(half) for half in halves]
        assert all(code % 2 == 0 for code in got)


class TestQuantize:
    @given(weights(views=True))
    def test_codes_and_scales_are_bit_for_bit_what_the_formula_gives(self, weight):
        before = weight.clone()
        assert_as_specified(weight)
        assert torch.equal(weight, before)

    @given(weights())
    def test_dequantizing_multiplies_each_code_by_its_block_scale(self, weight):
        codes, scales = quantize_blockwise(weight)
        got = dequantize_blockwise(codes, scales)
        assert got.dtype == torch.float32 and got.shape == weight.shape
        np.testing.assert_array_equal(got.numpy(), e4m3.dequantize(codes.view(torch.uint8).numpy(), scales.numpy()))

    def test_stacked_experts_are_quantized_each_by_itself(self):
        experts = torch.randn(3, 130, 200) * torch.tensor([1.0, 1e-3, 1e3]).view(3, 1, 1)
        codes, scales = quantize_blockwise(experts)
        for expert in range(3):
            alone = quantize_blockwise(experts[expert])
            assert torch.equal(codes[expert].view(torch.uint8), alone[0].view(torch.uint8))
            assert torch.equal(scales[expert], alone[1])
        assert torch.equal(dequantize_blockwise(codes, scales)[1], dequantize_blockwise(codes[1], scales[1]))

    @given(weights())
    def test_a_power_of_two_scale_is_the_raw_one_rounded_up(self, weight):
        raw = quantize_blockwise(weight)[1]
        codes, scales = quantize_blockwise(weight, power_of_two=True)
        mantissas, _ = torch.frexp(scales)
        assert bool((mantissas == 0.5).all())
        assert bool(((scales >= raw) & (scales < 2 * raw)).all())
        per_weight = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[
            : weight.shape[0], : weight.shape[1]
        ]
        exact = (weight.to(torch.bfloat16).float() / per_weight).numpy()  # a division by a power of two is exact
        np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), e4m3.encode(exact))


class TestRefused:
    @pytest.mark.parametrize(
        ("dtype", "bad"),
        [(torch.float32, float("nan")), (torch.bfloat16, -float("inf")), (torch.float16, float("inf"))],
    )
    def test_what_is_not_finite_is_refused_by_name_and_first_index(self, bad, dtype):
        weight = torch.zeros(200, 150, dtype=dtype)
        weight[131, 140] = weight[150, 0] = bad
        with pytest.raises(QuantizationError, match=r"layers\.0\.up\[131, 140\] is -?(nan|inf)") as refused:
            quantize_blockwise(weight, "layers.0.up")
        assert refused.value.detail == {"tensor": "layers.0.up", "index": [131, 140], "count": 2}

    @pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
    def test_a_non_finite_value_is_found_anywhere_in_a_large_tensor(self, bad):
        largest = torch.finfo(torch.bfloat16).max
        weight = torch.tensor([largest, -largest, 0.0]).to(torch.bfloat16).repeat(100_000)
        require_finite(weight, "embedding")
        for at in (300_000 - 1, 1 << 17, (1 << 17) - 1, 0):  # the first is named
            weight[at] = bad
            with pytest.raises(QuantizationError, match=rf"embedding\[{at}\] is -?(nan|inf)"):
                require_finite(weight, "embedding")

    def test_a_finite_fp32_value_that_bf16_cannot_hold_is_refused(self):
        largest_bf16, too_large = 3.3895313892515355e38, 3.4e38
        assert quantize_blockwise(torch.full((1, 1), largest_bf16))[0].float().item() == 448
        with pytest.raises(QuantizationError, match=r"w\[0, 1\] is 3\.39.*e\+38 \(in BF16: inf\)"):
            quantize_blockwise(torch.tensor([[1.0, too_large]]), "w")

    @pytest.mark.parametrize("shape", [(), (5,), (1, 2, 3, 4)])
    def test_what_is_no_matrix_is_refused(self, shape):
        with pytest.raises(QuantizationError, match=f"bias has {len(shape)} dimensions"):
            quantize_blockwise(torch.zeros(shape), "bias")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_look_at_several_weights_finds_a_number_that_is_none_anywhere(dtype, value):
    weights = [torch.randn(3, 700).to(dtype), torch.zeros(0, 4, dtype=dtype), torch.randn(5, dtype=torch.bfloat16)]
    assert bool(are_finite(weights)) and bool(are_finite([])) and bool(are_finite(weights[1:2]))
    for weight in (weights[0], weights[2]):
        for index in (0, weight.numel() // 2, weight.numel() - 1):
            before = weight.view(-1)[index].item()
            weight.view(-1)[index] = value
            assert not bool(are_finite(weights))
            weight.view(-1)[index] = before


def test_a_number_that_is_none_once_it_is_rounded_is_none():
    assert bool(are_finite([torch.tensor([torch.finfo(torch.bfloat16).max])]))
    assert not bool(are_finite([torch.tensor([1.0, -torch.finfo(torch.float32).max])]))
