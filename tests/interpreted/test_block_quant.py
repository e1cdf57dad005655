"""The kernels of rollout_service.engine.kernels against their formulas, in Triton's interpreter."""

import pytest
import torch

from rollout_service.engine.kernels import block_quant
from rollout_service.engine.kernels.block_quant import rms_norm_per_block_quant, silu_and_mul_per_block_quant

EPSILON = 1e-6
MIN_SCALE = 1 / (448 * 512)


def quantized(numbers):
    groups = numbers.float().unflatten(-1, (-1, 128))
    scales = (groups.abs().amax(-1) / 448).clamp(min=MIN_SCALE)
    return (groups / scales[..., None]).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn), scales


def outputs(tokens, width, *, transposed):
    codes = torch.zeros(tokens, width, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(width // 128, tokens).T if transposed else torch.zeros(tokens, width // 128)
    return codes, scales


def assert_equal_but_for_last_bits(codes, scales, expected_codes, expected_scales):
    torch.testing.assert_close(scales, expected_scales, rtol=2**-7, atol=0)
    close = expected_codes.float() * expected_scales.repeat_interleave(128, -1)
    torch.testing.assert_close(codes.float() * scales.repeat_interleave(128, -1), close, rtol=2**-3, atol=1e-6)
    assert (codes.view(torch.uint8) != expected_codes.view(torch.uint8)).float().mean() < 0.01


@pytest.mark.parametrize(
    ("width", "transposed", "has_residual"),
    [(128, True, True), (256, False, False), (640, True, False), (640, False, True)],
)
def test_a_norm_is_quantized_as_its_formula(width, transposed, has_residual):
    torch.manual_seed(width)
    x, r = (torch.randn(3, width).bfloat16() for _ in "xr")
    w = (1 + torch.randn(width) / 4).bfloat16()
    total = x.float() + r.float() if has_residual else x.float()
    normalized = (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPSILON)).bfloat16()
    expected = quantized(normalized * w)
    codes, scales = outputs(3, width, transposed=transposed)
    residual = r.clone() if has_residual else None
    rms_norm_per_block_quant(codes, x, w, scales, EPSILON, None, residual, 128, transposed)
    assert_equal_but_for_last_bits(codes, scales, *expected)
    if residual is not None:
        assert torch.equal(residual, total.bfloat16())


@pytest.mark.parametrize(("width", "transposed"), [(128, True), (384, False), (128 * 17, True)])
def test_silu_is_quantized_without_being_rounded_before(width, transposed):
    torch.manual_seed(width)
    both = (3 * torch.randn(3, 3 * width)).bfloat16()[:, : 2 * width]  # rows that are apart
    both[1] = 0  # whose groups have the smallest scale
    gate, up = both.float().chunk(2, -1)
    expected = quantized(gate / (1 + torch.exp(-gate)) * up)
    codes, scales = outputs(3, width, transposed=transposed)
    silu_and_mul_per_block_quant(codes, both, scales, 128, None, transposed)
    assert_equal_but_for_last_bits(codes, scales, *expected)


def test_no_tokens_launch_nothing(monkeypatch):
    monkeypatch.setattr(block_quant, "_quantize_silu", None)  # which no grid can be asked of
    codes, scales = outputs(0, 128, transposed=True)
    silu_and_mul_per_block_quant(codes, torch.zeros(0, 256, dtype=torch.bfloat16), scales, 128, None, True)


def test_other_groups_are_refused():
    codes, scales = outputs(1, 128, transposed=False)
    with pytest.raises(ValueError, match="groups of 64"):
        silu_and_mul_per_block_quant(codes, torch.zeros(1, 256, dtype=torch.bfloat16), scales, 64)
