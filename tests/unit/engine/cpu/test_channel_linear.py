"""INT8 products on the CPU are those of vLLM's quantized inputs with the decoded weights, of the newest load."""

import torch

from rollout_service.engine.cpu.channel_linear import CpuChannelLinearMethod, through_int8
from rollout_service.quant.channelwise import dequantize_channelwise, quantize_channelwise

BF16_STEP = 2**-8


def test_each_token_has_a_scale_of_its_own_and_codes_up_to_127() -> None:
    inputs = torch.randn(5, 300).bfloat16() * torch.tensor([[1.0], [1e3], [1e-3], [1e-30], [0.0]])
    rounded = through_int8(inputs)
    assert torch.equal(rounded[4], torch.zeros(300))
    largest = inputs.float().abs().amax(-1, keepdim=True)[:4]
    codes = rounded[:4] / (largest / 127)
    torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)
    assert torch.equal(codes.round().abs().amax(-1), torch.full((4,), 127.0))
    assert ((rounded[:4] - inputs[:4].float()).abs() <= 0.5001 * largest / 127).all()


def test_inputs_are_quantized_biases_are_added_and_a_reload_replaces_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    method, layer, inputs = CpuChannelLinearMethod(), torch.nn.Module(), torch.randn(7, 100, generator=generator)
    bias = torch.randn(30, generator=generator).bfloat16()
    for _ in range(2):
        codes, scales = quantize_channelwise(torch.randn(30, 100, generator=generator))
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        method.process_weights_after_loading(layer)
        output = method.apply(layer, inputs.bfloat16(), bias).float()
        expected = through_int8(inputs.bfloat16()) @ dequantize_channelwise(codes, scales).T + bias.float()
        w8a16 = inputs.bfloat16().float() @ dequantize_channelwise(codes, scales).T + bias.float()
        assert ((output - expected).abs() <= BF16_STEP * expected.abs() + 1e-6).all()
        assert (output - w8a16).abs().mean() > 2 * (output - expected).abs().mean()
