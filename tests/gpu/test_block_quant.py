"""Our quantizing kernels as they are compiled, beside vLLM's."""

import pytest
import torch
from vllm import _custom_ops as ops

from rollout_service.engine.kernels.block_quant import rms_norm_per_block_quant, silu_and_mul_per_block_quant
from tests.support.models import random_weights
from tests.support.one_engine import mean_difference, running

CUDA = torch.device("cuda")
EPSILON = 1e-6
FP8_MEAN = 0.06
"""As in tests/gpu/test_engine.py."""
MAX_DIFFERING = 1e-3
"""Share of results that the last bits of a sum or an exponential may change."""


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("vLLM has these kernels for Hopper and later")


def assert_nearly_equal(codes, scales, expected_codes, expected_scales):
    torch.testing.assert_close(scales, expected_scales, rtol=2**-7, atol=0)
    differing = codes.view(torch.uint8) != expected_codes.view(torch.uint8)
    assert differing.float().mean() < MAX_DIFFERING
    assert (abs(scales / expected_scales - 1) > 1e-6).float().mean() < MAX_DIFFERING


def outputs(tokens, width):
    codes = torch.empty(tokens, width, device=CUDA, dtype=torch.float8_e4m3fn)
    return codes, torch.empty(width // 128, tokens, device=CUDA).T


@pytest.mark.parametrize("tokens", [1, 7, 256, 1000])
@pytest.mark.parametrize("width", [1024, 4096, 5120])
def test_a_norm_is_quantized_as_vllm_does(tokens, width):
    torch.manual_seed(width)
    x, residual = (torch.randn(tokens, width, device=CUDA).bfloat16() for _ in range(2))
    weight = (1 + torch.randn(width, device=CUDA) / 8).bfloat16()
    theirs, (codes, scales) = residual.clone(), outputs(tokens, width)
    expected = ops.rms_norm_per_block_quant(
        x, weight, EPSILON, torch.float8_e4m3fn, [1, 128], residual=theirs, is_scale_transposed=True
    )
    rms_norm_per_block_quant(codes, x, weight, scales, EPSILON, None, residual, 128, True)
    assert torch.equal(residual, theirs)
    assert_nearly_equal(codes, scales, *expected)


@pytest.mark.parametrize("tokens", [1, 7, 256, 1000])
@pytest.mark.parametrize("width", [768, 12288, 25600])
def test_silu_is_quantized_as_vllm_does(tokens, width):
    torch.manual_seed(width)
    both, (codes, scales) = torch.randn(tokens, 2 * width, device=CUDA).bfloat16(), outputs(tokens, width)
    expected = ops.silu_and_mul_per_block_quant(both, 128, torch.float8_e4m3fn, is_scale_transposed=True)
    silu_and_mul_per_block_quant(codes, both, scales, 128, None, True)
    assert_nearly_equal(codes, scales, *expected)


async def test_an_engine_quantizes_activations_with_our_kernels(tmp_path, monkeypatch):
    settings = {"linear_backend": "cutlass", "gpu_memory_utilization": 0.2}
    async with running("qwen3", tmp_path, monkeypatch, **settings) as one:
        folder = await one.update(1, random_weights(one.config.model.path, seed=1))
        assert await mean_difference(one, folder, fp8=True) < FP8_MEAN
        assert await one.engine.ask_workers("quantizing_kernels") == [["_quantize_norm", "_quantize_silu"]]
