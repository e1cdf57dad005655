"""Products on the CPU are those of vLLM's quantized inputs with the decoded weights, of the newest load."""

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from rollout_service.compat.vllm_internals import GroupShape, QuantFP8
from rollout_service.engine.cpu.channel_linear import THROUGH_CODES, CpuChannelLinearMethod, through_fp8, through_int8
from rollout_service.quant.formats import FP8_CHANNEL, INT8_CHANNEL

BF16_STEP = 2**-8


def test_each_token_has_a_scale_of_its_own_and_codes_up_to_127():
    inputs = torch.randn(5, 300).bfloat16() * torch.tensor([[1.0], [1e3], [1e-3], [1e-30], [0.0]])
    rounded = through_int8(inputs)
    assert torch.equal(rounded[4], torch.zeros(300))
    largest = inputs.float().abs().amax(-1, keepdim=True)[:4]
    codes = rounded[:4] / (largest / 127)
    torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)
    assert torch.equal(codes.round().abs().amax(-1), torch.full((4,), 127.0))
    assert ((rounded[:4] - inputs[:4].float()).abs() <= 0.5001 * largest / 127).all()


def test_int8_inputs_are_those_of_ieee_divisions():
    inputs = torch.randn(200, 300).bfloat16() * torch.logspace(-8, 8, 200).bfloat16()[:, None]
    x = inputs.float().numpy()
    largest = np.abs(x).max(-1, keepdims=True)
    codes = np.rint(x * (np.float32(127) / largest))
    assert np.array_equal(through_int8(inputs).numpy(), codes * (largest / np.float32(127)))


def test_fp8_inputs_are_those_of_vllm_but_for_quotients_beside_a_tie():
    """vLLM's own for the CPU multiplies with the reciprocal, as what torch.compile makes of it on a GPU does; its CUDA
    kernel, which experts and eager engines have, divides."""
    inputs = torch.randn(200, 300).bfloat16() * torch.logspace(-30, 30, 200).bfloat16()[:, None]
    inputs[7] = 0
    with set_current_vllm_config(VllmConfig()):
        codes, scales = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN).forward_native(inputs)
    ours, vllms = through_fp8(inputs), codes.float() * scales
    assert torch.equal(ours.abs().amax(-1), vllms.abs().amax(-1))
    neighbours = (ours - vllms).abs() <= 0.126 * inputs.float().abs() + scales * 2**-9
    assert neighbours.all() and (ours != vllms).float().mean() < 0.01


@pytest.mark.parametrize("form", [FP8_CHANNEL, INT8_CHANNEL], ids=lambda form: form.name)
def test_inputs_are_quantized_biases_are_added_and_a_reload_replaces_weights(form):
    generator = torch.Generator().manual_seed(0)
    method, layer, inputs = CpuChannelLinearMethod(form), torch.nn.Module(), torch.randn(7, 100, generator=generator)
    bias = torch.randn(30, generator=generator).bfloat16()
    for _ in range(2):
        codes, scales = form.quantize(torch.randn(30, 100, generator=generator))
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        method.process_weights_after_loading(layer)
        output = method.apply(layer, inputs.bfloat16(), bias).float()
        rounded, decoded = THROUGH_CODES[form.name](inputs.bfloat16()), form.dequantize(codes, scales)
        expected = rounded @ decoded.T + bias.float()
        w8a16 = inputs.bfloat16().float() @ decoded.T + bias.float()
        assert ((output - expected).abs() <= BF16_STEP * expected.abs() + 1e-6).all()
        assert (output - w8a16).abs().mean() > 2 * (output - expected).abs().mean()
