"""The product's tiles, masks and scales against fp32. Which last bits its sums have is decided on a GPU."""

import pytest
import torch

from rollout_service.quant.blockwise import dequantize_blockwise, quantize_blockwise
from rollout_service.quant.fake_quant import group_codes, through_groups
from rollout_service.quant.fp8_product import scaled_product


@pytest.mark.parametrize("scales_in_turn", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 128, 128), (130, 144, 384), (5, 272, 256)])
def test_any_shape_gives_the_product_of_what_the_codes_stand_for(tokens, rows, columns, scales_in_turn):
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, columns) * torch.logspace(-3, 3, columns), torch.randn(rows, columns)
    codes, scales = quantize_blockwise(weight)
    found = scaled_product(*group_codes(hidden), codes, scales, dtype=torch.float32, scales_in_turn=scales_in_turn)
    expected = through_groups(hidden).double() @ dequantize_blockwise(codes, scales).double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_no_tokens_have_no_results():
    codes, scales = quantize_blockwise(torch.randn(128, 128))
    assert scaled_product(*group_codes(torch.ones(0, 128)), codes, scales, dtype=torch.bfloat16).shape == (0, 128)


def test_scales_of_another_layout_are_refused():
    codes, scales = quantize_blockwise(torch.randn(256, 128))
    with pytest.raises(ValueError, match=r"input \[3, 128\].*\(256, 128\), \(1, 2\) instead of .*\(2, 1\)"):
        scaled_product(*group_codes(torch.ones(3, 128)), codes, scales.T, dtype=torch.bfloat16)
