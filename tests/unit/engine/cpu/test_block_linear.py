"""The CPU kernel multiplies what the GPU kernels multiply: FP8 weights and FP8 activations."""

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, create_fp8_quant_key

from rollout_service.engine.cpu.block_linear import CpuBlockScaledMM
from rollout_service.quant.blockwise import dequantize_blockwise, quantize_blockwise

BF16_STEP = 2**-8
"""The output is rounded to BF16: half a step of 8 bits, with room for the order of summation."""


def _layer(codes: torch.Tensor, scales: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(codes, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
    return layer


def _kernel(shape: tuple[int, int]) -> CpuBlockScaledMM:
    with set_current_vllm_config(VllmConfig()):
        return CpuBlockScaledMM(
            FP8ScaledMMLinearLayerConfig(
                weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(128, 128)),
                activation_quant_key=create_fp8_quant_key(static=False, group_shape=GroupShape(1, 128)),
                input_dtype=torch.bfloat16,
                out_dtype=torch.bfloat16,
                weight_shape=shape,
            )
        )


def test_activations_are_quantized_and_a_reload_replaces_weights():
    generator = torch.Generator().manual_seed(0)
    kernel = _kernel((512, 256))
    inputs = torch.randn(7, 256, generator=generator).bfloat16()
    groups = inputs.float().unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    quantized = ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)
    for _ in range(2):
        codes, weight_scales = quantize_blockwise(torch.randn(512, 256, generator=generator))
        layer = _layer(codes, weight_scales)
        kernel.process_weights_after_loading(layer)
        output = kernel.apply_weights(layer, inputs).float()
        weight = dequantize_blockwise(codes, weight_scales)
        expected, w8a16 = quantized @ weight.T, inputs.float() @ weight.T
        size = expected.abs().mean()
        assert (output - expected).abs().mean() < BF16_STEP * size
        assert (output - w8a16).abs().mean() > 4 * BF16_STEP * size
