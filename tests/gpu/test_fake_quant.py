"""A layer under ``fake_quant`` has vLLM's results on the GPU, bit for bit: its codes, its scales and its products."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.blockwise import quantize_blockwise
from rollout_service.quant.engine_roundings import engine_roundings
from rollout_service.quant.fake_quant import Products, fake_quant, group_codes

GPU = torch.device("cuda")
RECIPE = TrainerRecipe(weights="fp8_block", quantized=("weight",))
SHAPES = [(256, 256), (1024, 256), (256, 384), (4096, 2048), (2048, 4096), (4096, 12288)]
"""Rows and columns of weights: those of the models of ``benchmarks.mismatch.logprobs``, and of real ones."""
TOKENS = (1, 3, 20, 68, 256, 1000)


def activations(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    """With outlier channels, tiny, huge and zero rows, as far as there are rows for them."""
    generator = torch.Generator(GPU).manual_seed(seed)
    made = torch.randn(tokens, columns, generator=generator, device=GPU)
    made[:, ::97] *= 50
    for row, scale in ((5, 1e-12), (6, 1e-30), (7, 0.0), (8, 1e30), (9, 1e-38)):
        if row < tokens:
            made[row] *= scale
    return made.bfloat16()


def of_vllm(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = per_token_group_quant_fp8(hidden, 128, column_major_scales=True, use_ue8m0=False)
    return codes, scales


def cutlass(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What an engine's linear layer computes, ``CutlassFp8BlockScaledMMKernel``."""
    inputs, input_scales = of_vllm(hidden)
    codes, scales = quantize_blockwise(weight)
    return ops.cutlass_scaled_mm(inputs, codes.T, out_dtype=torch.bfloat16, scale_a=input_scales, scale_b=scales.T)


def ours(hidden: torch.Tensor, weight: torch.Tensor, products: Products | None = None) -> torch.Tensor:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16, device=GPU)
    layer.weight.data.copy_(weight)
    with torch.no_grad(), fake_quant(layer, RECIPE, roundings=False, products=products):
        return layer(hidden)


def unlike(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of elements that differ."""
    return float((found != expected).float().mean())


@pytest.mark.parametrize("columns", [128, 256, 384, 4096])
@pytest.mark.parametrize("tokens", TOKENS)
def test_activations_get_the_codes_and_scales_of_vllm(tokens, columns):
    for seed in range(4):
        hidden = activations(tokens, columns, seed)
        (codes, scales), (expected_codes, expected_scales) = group_codes(hidden), of_vllm(hidden)
        assert torch.equal(scales.view(torch.int32), expected_scales.contiguous().view(torch.int32))
        assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))


@pytest.mark.parametrize("tokens", TOKENS)
def test_what_experts_make_of_the_gate_gets_the_codes_and_scales_of_vllm(tokens):
    both = torch.cat([activations(tokens, 768, 0), activations(tokens, 768, 1)], 1).clamp(-1e4, 1e4)  # or it is NaN
    expected_codes, expected_scales = ops.silu_and_mul_per_block_quant(both, 128, torch.float8_e4m3fn)
    gate, up = both.float().chunk(2, dim=-1)
    codes, scales = group_codes(gate * gate.sigmoid() * up, fused="activation")
    # an exponential of another library may have another last bit
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    assert unlike(codes.view(torch.uint8), expected_codes.view(torch.uint8)) < 1e-4


@pytest.mark.parametrize("columns", [256, 4096])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_norm_that_quantizes_has_the_codes_of_vllm(tokens, columns):
    config = Qwen3Config(hidden_size=columns, num_hidden_layers=1, num_attention_heads=2, intermediate_size=256)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(GPU)
    layer = model.model.layers[0]
    norm, attention = layer.input_layernorm, layer.self_attn
    torch.nn.init.normal_(norm.weight, 1, 0.1)
    added = activations(tokens, columns, 0).clamp(-1e4, 1e4)
    residual = activations(tokens, columns, 1).clamp(-1e4, 1e4)
    quantized = (attention.q_proj, attention.k_proj, attention.v_proj)
    with torch.no_grad(), engine_roundings(model, kernels="cuda_compiled", quantized=quantized):
        codes, scales = group_codes(norm(added.float() + residual.float()), fused="norm")
    expected_codes, expected_scales = ops.rms_norm_per_block_quant(
        added, norm.weight.data, norm.variance_epsilon, torch.float8_e4m3fn, [1, 128], residual=residual
    )
    # squares are summed in another order: a number may round to its neighbour
    torch.testing.assert_close(scales, expected_scales, rtol=2**-7, atol=0)
    assert unlike(scales, expected_scales) < 1e-2
    assert unlike(codes.view(torch.uint8), expected_codes.view(torch.uint8)) < 1e-2


def test_every_amax_and_every_value_below_it_gets_the_code_of_vllm():
    """All pairs of a group's largest mantissa and exponent, and of a value's mantissa within 16 binades below."""
    mantissas = torch.arange(128, dtype=torch.int32, device=GPU)
    values = torch.cat([((127 - down) << 7) + mantissas for down in range(16)])  # BF16 bits, 1.0 … 2 and below
    groups = values.view(16, 128).repeat(128, 1)
    amax = ((128 << 7) + mantissas).repeat_interleave(16)
    groups[:, 0] = amax
    hidden = groups.to(torch.int16).view(torch.bfloat16)
    assert torch.equal(group_codes(hidden)[0].view(torch.uint8), of_vllm(hidden)[0].view(torch.uint8))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_linear_layer_has_the_bits_of_cutlass(rows, columns, tokens, record_property):
    weight = (0.02 * torch.randn(rows, columns, device=GPU)).bfloat16()
    hidden = activations(tokens, columns)
    expected, found = cutlass(hidden, weight), ours(hidden, weight)
    in_fp32, in_bf16 = ours(hidden, weight, "fp32"), ours(hidden, weight, "bf16")
    shares = ", ".join(f"{unlike(each, expected):.2e}" for each in (found, in_fp32, in_bf16))
    record_property("share unlike CUTLASS's with products in fp8, fp32, bf16", shares)
    assert torch.equal(found, expected), shares


def test_a_result_is_the_same_among_any_others():
    """A trainer scores whole sequences of what an engine sampled token by token."""
    weight, hidden = torch.randn(384, 256, device=GPU).bfloat16(), activations(300, 256)
    whole = ours(hidden, weight)
    assert torch.equal(whole[:200], ours(hidden[:200], weight))
    assert torch.equal(whole[17:18], ours(hidden[17:18], weight))


def test_gradients_are_those_of_the_rounded_input_and_weight():
    torch.manual_seed(0)
    layer = nn.Linear(256, 384, bias=True, dtype=torch.bfloat16, device=GPU)
    hidden = torch.randn(64, 256, dtype=torch.bfloat16, device=GPU)
    found = {}
    for products in ("fp8", "bf16"):
        leaf = hidden.clone().requires_grad_()
        layer.zero_grad()
        with fake_quant(layer, RECIPE, roundings=False, products=products):
            layer(leaf).sum().backward()
        assert leaf.grad is not None and layer.weight.grad is not None
        found[products] = (leaf.grad.clone(), layer.weight.grad.clone())
    for of_fp8, of_bf16 in zip(found["fp8"], found["bf16"], strict=True):
        assert torch.equal(of_fp8, of_bf16)
