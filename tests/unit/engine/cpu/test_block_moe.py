"""FP8 experts on the CPU compute what a GPU's kernels compute: both products of each expert with FP8 inputs."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import gelu, silu
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import MoEActivation
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from rollout_service.engine.cpu.block_moe import CpuBlockMoEMethod
from rollout_service.quant.blockwise import dequantize_blockwise, quantize_blockwise

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 4, 256, 128, 9
# Relative, of the mean difference. Both sides round what lies between the products to BF16; where another order of
# summation moves it to the neighbouring value, E4M3 may do so too. Seen: 0.0014 (0.019 where one rounding is left out).
TOLERANCE = 0.005


def _layer(**changes: object) -> torch.nn.Module:
    layer = torch.nn.Module()
    settings = {
        "layer_name": "model.layers.0.mlp.experts",
        "moe_config": SimpleNamespace(has_bias=False),
        "activation": MoEActivation.SILU,
        "swiglu_limit": None,
        "apply_router_weight_on_input": False,
        "expert_map": None,
    }
    for name, value in (settings | changes).items():
        setattr(layer, name, value)
    return layer


def _load(layer: torch.nn.Module, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized random experts into the layer; returns what they dequantize to, [E, 2·I, H] and [E, H, I]."""
    generator = torch.Generator().manual_seed(seed)
    dequantized = []
    for name, rows, columns in (("w13", 2 * INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE)):
        weights = torch.randn(EXPERTS, rows, columns, generator=generator) * columns**-0.5
        pairs = [quantize_blockwise(weight) for weight in weights]
        for suffix, tensors in zip(("weight", "weight_scale_inv"), zip(*pairs, strict=True), strict=True):
            setattr(layer, f"{name}_{suffix}", torch.nn.Parameter(torch.stack(tensors), requires_grad=False))
        dequantized.append(torch.stack([dequantize_blockwise(*pair) for pair in pairs]))
    return dequantized[0], dequantized[1]


def _method(layer: torch.nn.Module, block: list[int] | None = None) -> CpuBlockMoEMethod:
    with set_current_vllm_config(VllmConfig()):
        return CpuBlockMoEMethod(Fp8Config(weight_block_size=block or [128, 128]), layer)


def _through_fp8(x: torch.Tensor) -> torch.Tensor:
    groups = x.float().unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)


def _expected(x, weights, ids, w13, w2, *, act=silu, round_first=True, round_second=True):
    """One token and one expert after another, in fp32 between the roundings."""
    rows = []
    for token, row in enumerate(_through_fp8(x) if round_first else x.float()):
        total = torch.zeros(HIDDEN)
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (w13[expert] @ row).bfloat16().float().chunk(2)
            hidden = (act(gate) * up).bfloat16()
            total += weight * (w2[expert] @ (_through_fp8(hidden) if round_second else hidden.float()))
        rows.append(total)
    return torch.stack(rows)


def _tokens(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, and two experts of each token with their weights; expert 3 gets no token."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:2] for _ in range(TOKENS)]).int()
    return inputs, torch.rand(TOKENS, 2, generator=generator), ids


def test_both_gemm_inputs_are_quantized_and_reloads_take_effect():
    layer = _layer()
    method = _method(layer)
    inputs, weights, ids = _tokens()
    for seed in range(2):
        w13, w2 = _load(layer, seed)
        method.process_weights_after_loading(layer)
        output = method.apply(layer, inputs, weights, ids, None, None)
        assert output.dtype == torch.bfloat16 and output.shape == inputs.shape
        expected = _expected(inputs, weights, ids, w13, w2)
        size = expected.abs().mean()
        assert (output.float() - expected).abs().mean() < TOLERANCE * size
        for unrounded in ({"round_first": False}, {"round_second": False}):
            other = _expected(inputs, weights, ids, w13, w2, **unrounded)
            assert (output.float() - other).abs().mean() > 2 * TOLERANCE * size, unrounded


def test_swapping_two_experts_changes_the_output():
    layer = _layer()
    method = _method(layer)
    inputs, weights, ids = _tokens()
    w13, w2 = _load(layer, seed=0)
    method.process_weights_after_loading(layer)
    output = method.apply(layer, inputs, weights, ids, None, None).float()
    swapped = _expected(inputs, weights, ids, w13[[1, 0, 2, 3]], w2[[1, 0, 2, 3]])
    assert (output - swapped).abs().mean() > 10 * TOLERANCE * output.abs().mean()


def test_the_parts_of_ranks_with_whole_experts_add_up():
    layer = _layer()
    w13, w2 = _load(layer, seed=0)
    held = {name: parameter.data for name, parameter in layer.named_parameters()}
    inputs, weights, ids = _tokens()
    total = torch.zeros(TOKENS, HIDDEN)
    for expert_map in ([-1, -1, 0, 1], [0, 1, -1, -1]):
        rank = _layer(expert_map=torch.tensor(expert_map, dtype=torch.int32))
        for name, tensor in held.items():
            local = tensor[torch.tensor(expert_map) >= 0]
            setattr(rank, name, torch.nn.Parameter(local, requires_grad=False))
        method = _method(rank)
        method.process_weights_after_loading(rank)
        part = method.apply(rank, inputs, weights, ids, None, None).float()
        assert part.abs().sum() > 0
        total += part
    expected = _expected(inputs, weights, ids, w13, w2)
    assert (total - expected).abs().mean() < 2 * TOLERANCE * expected.abs().mean()


def test_gelu_experts_are_computed_with_gelu():
    layer = _layer(activation=MoEActivation.GELU)
    method = _method(layer)
    inputs, weights, ids = _tokens()
    w13, w2 = _load(layer, seed=0)
    method.process_weights_after_loading(layer)
    output = method.apply(layer, inputs, weights, ids, None, None).float()
    expected = _expected(inputs, weights, ids, w13, w2, act=gelu)
    assert (output - expected).abs().mean() < TOLERANCE * expected.abs().mean()


def test_codes_and_scales_stay_as_they_were_loaded():
    layer = _layer()
    method = _method(layer)
    _load(layer, seed=0)
    before = {name: tensor.clone() for name, tensor in layer.named_parameters()}
    method.process_weights_after_loading(layer)
    after = dict(layer.named_parameters())
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"activation": MoEActivation.SWIGLUOAI}, "activation swigluoai"),
        ({"moe_config": SimpleNamespace(has_bias=True)}, "biases"),
        ({"swiglu_limit": 7.0}, "a clamped SwiGLU"),
        ({"apply_router_weight_on_input": True}, "router weights on the input"),
    ],
)
def test_unsupported_experts_are_refused_by_name(changes, complaint):
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.experts: .*{complaint}"):
        _method(_layer(**changes))


def test_blocks_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"weight blocks \[64, 128\]"):
        _method(_layer(), block=[64, 128])
