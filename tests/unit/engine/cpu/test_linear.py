"""Products on the CPU are those of quantized inputs with the decoded weights, of the newest load."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from rollout_service.compat.vllm_internals import GroupShape, QuantFP8
from rollout_service.engine.cpu.linear import (
    THROUGH_CODES,
    CpuBlockLinearMethod,
    CpuChannelLinearMethod,
    through_fp8,
    through_int8,
)
from rollout_service.quant.formats import FP8_CHANNEL, INT8_CHANNEL, WEIGHT_FORMATS

BF16_STEP = 2**-8
"""The output is rounded to BF16: half a step of 8 bits, with room for the order of summation."""


@pytest.fixture(autouse=True, scope="module")
def vllm_config() -> Iterator[None]:
    config = VllmConfig(compilation_config={"mode": 0})  # as in engines, which are eager on the CPU
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        yield


def test_int8_inputs_are_those_of_ieee_divisions():
    inputs = torch.randn(200, 300).bfloat16() * torch.logspace(-8, 8, 200).bfloat16()[:, None]
    inputs[7], inputs[8] = 0, inputs[8] * 1e-22
    x = inputs.float().numpy()
    largest = np.abs(x).max(-1, keepdims=True)
    codes = np.rint(x * np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0))
    assert np.array_equal(np.abs(codes).max(-1), np.where(largest[:, 0] > 0, 127, 0))
    assert np.array_equal(through_int8(inputs).numpy(), codes * (largest / np.float32(127)))


def test_fp8_inputs_are_those_of_vllm_but_for_quotients_beside_a_tie():
    """vLLM's own for the CPU multiplies with the reciprocal, as what torch.compile makes of it on a GPU does; its CUDA
    kernel, which experts and eager engines have, divides."""
    inputs = torch.randn(200, 300).bfloat16() * torch.logspace(-30, 30, 200).bfloat16()[:, None]
    inputs[7] = 0
    codes, scales = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN).forward_native(inputs)
    ours, vllms = through_fp8(inputs), codes.float() * scales
    assert torch.equal(ours.abs().amax(-1), vllms.abs().amax(-1))
    neighbours = (ours - vllms).abs() <= 0.126 * inputs.float().abs() + scales * 2**-9
    assert neighbours.all() and (ours != vllms).float().mean() < 0.01


def through_groups(x: torch.Tensor) -> torch.Tensor:
    """Round [M, K] through FP8 in groups of 1×128."""
    groups = x.float().unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)


@pytest.mark.parametrize("name", ["fp8_block", FP8_CHANNEL.name, INT8_CHANNEL.name])
def test_inputs_are_quantized_biases_are_added_and_a_reload_replaces_weights(name):
    form, generator, layer = WEIGHT_FORMATS[name], torch.Generator().manual_seed(0), torch.nn.Module()
    if name == "fp8_block":
        method, through_codes = CpuBlockLinearMethod(Fp8Config(weight_block_size=[128, 128])), through_groups
    else:
        method, through_codes = CpuChannelLinearMethod(form), THROUGH_CODES[name]
    scale = "weight_scale_inv" if form.in_blocks else "weight_scale"
    inputs = torch.randn(7, 256, generator=generator).bfloat16()
    bias = torch.randn(384, generator=generator).bfloat16()
    for _ in range(2):
        codes, scales = form.quantize(torch.randn(384, 256, generator=generator))
        layer.weight = torch.nn.Parameter(codes.clone(), requires_grad=False)
        setattr(layer, scale, torch.nn.Parameter(scales.clone(), requires_grad=False))
        method.process_weights_after_loading(layer)
        output = method.apply(layer, inputs[None], bias)[0].float()
        decoded = form.dequantize(codes, scales)
        expected = through_codes(inputs) @ decoded.T + bias.float()
        w8a16 = inputs.float() @ decoded.T + bias.float()
        assert ((output - expected).abs() <= BF16_STEP * expected.abs() + 1e-5).all()
        assert (output - w8a16).abs().mean() > 2 * (output - expected).abs().mean()
        assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(getattr(layer, scale), scales)


def test_blocks_of_another_size_are_refused():
    with pytest.raises(ValueError, match="weight blocks must be 128×128"):
        CpuBlockLinearMethod(Fp8Config(weight_block_size=[64, 128]))
