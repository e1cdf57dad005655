"""Experts on the CPU compute what a GPU's kernels compute: both products of each expert with quantized inputs."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import gelu, silu
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import MoEActivation
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from rollout_service.engine.cpu.experts import CpuBlockMoEMethod, CpuChannelMoEMethod, CpuExperts
from rollout_service.engine.cpu.linear import THROUGH_CODES
from rollout_service.quant.formats import WEIGHT_FORMATS
from tests.unit.engine.cpu.test_linear import through_groups

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 4, 256, 128, 9
# Relative, of the mean difference. Both sides round what lies between the products to BF16; where another order of
# summation moves it to the neighbouring value, E4M3 may do so too. Seen: 0.0014 (0.019 where one rounding is left out).
TOLERANCE = 0.005


def layer_of(**changes: object) -> torch.nn.Module:
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


def method_of(layer: torch.nn.Module, name: str = "fp8_block", block: tuple[int, int] = (128, 128)) -> CpuExperts:
    with set_current_vllm_config(VllmConfig(compilation_config={"mode": 0})):
        if name == "fp8_block":
            return CpuBlockMoEMethod(Fp8Config(weight_block_size=[*block]), layer)
        method = CpuChannelMoEMethod(WEIGHT_FORMATS[name], layer)
    method.create_weights(layer, EXPERTS, HIDDEN, INTERMEDIATE, torch.bfloat16)
    return method


def load(layer: torch.nn.Module, seed: int, name: str = "fp8_block") -> list[torch.Tensor]:
    """Load quantized random experts into the layer. Return what they dequantize to, [E, 2·I, H] and [E, H, I]."""
    form, generator = WEIGHT_FORMATS[name], torch.Generator().manual_seed(seed)
    dequantized = []
    suffixes = "weight", "weight_scale_inv" if form.in_blocks else "weight_scale"
    for which, rows, columns in (("w13", 2 * INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE)):
        weights = torch.randn(EXPERTS, rows, columns, generator=generator) * columns**-0.5
        pairs = [form.quantize(weight) for weight in weights]
        for suffix, tensors in zip(suffixes, zip(*pairs, strict=True), strict=True):
            loaded = torch.stack(tensors)
            if (there := getattr(layer, f"{which}_{suffix}", None)) is not None:
                assert there.shape == loaded.shape and there.dtype == loaded.dtype
            setattr(layer, f"{which}_{suffix}", torch.nn.Parameter(loaded, requires_grad=False))
        dequantized.append(torch.stack([form.dequantize(*pair) for pair in pairs]))
    return dequantized


def expected_of(x, weights, ids, w13, w2, *, through=through_groups, act=silu, round_first=True, round_second=True):
    """One token and one expert after another, in fp32 between the roundings."""
    rows = []
    for token, row in enumerate(through(x) if round_first else x.float()):
        total = torch.zeros(HIDDEN)
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (w13[expert] @ row).bfloat16().float().chunk(2)
            hidden = (act(gate) * up).bfloat16()
            total += weight * (w2[expert] @ (through(hidden[None])[0] if round_second else hidden.float()))
        rows.append(total)
    return torch.stack(rows)


@pytest.fixture
def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, and two experts of each token with their weights; expert 3 gets no token."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:2] for _ in range(TOKENS)]).int()
    return inputs, torch.rand(TOKENS, 2, generator=generator), ids


@pytest.mark.parametrize(
    ("name", "activation", "act"),
    [
        ("fp8_block", MoEActivation.SILU, silu),
        ("fp8_block", MoEActivation.GELU, gelu),
        ("fp8_channel", MoEActivation.SILU, silu),
        ("int8_channel", MoEActivation.SILU, silu),
    ],
)
def test_both_inputs_are_quantized_and_reloads_take_effect(tokens, name, activation, act):
    layer = layer_of(activation=activation)
    method = method_of(layer, name)
    inputs, weights, ids = tokens
    through = through_groups if name == "fp8_block" else THROUGH_CODES[name]
    tolerance = TOLERANCE if name != "int8_channel" else TOLERANCE / 2  # INT8 is finer
    for seed in range(2):
        w13, w2 = load(layer, seed, name)
        before = {parameter: tensor.clone() for parameter, tensor in layer.named_parameters()}
        method.process_weights_after_loading(layer)
        output = method.apply(layer, inputs, weights, ids, None, None)
        assert output.dtype == torch.bfloat16 and output.shape == inputs.shape
        expected = expected_of(inputs, weights, ids, w13, w2, through=through, act=act)
        size = expected.abs().mean()
        assert (output.float() - expected).abs().mean() < tolerance * size
        for unrounded in ({"round_first": False}, {"round_second": False}):
            other = expected_of(inputs, weights, ids, w13, w2, through=through, act=act, **unrounded)
            assert (output.float() - other).abs().mean() > 2 * tolerance * size, unrounded
        for parameter, tensor in layer.named_parameters():
            assert torch.equal(before[parameter].view(torch.uint8), tensor.view(torch.uint8)), parameter


def test_the_parts_of_ranks_with_whole_experts_add_up(tokens):
    layer = layer_of()
    w13, w2 = load(layer, seed=0)
    held = {name: parameter.data for name, parameter in layer.named_parameters()}
    inputs, weights, ids = tokens
    total = torch.zeros(TOKENS, HIDDEN)
    for expert_map in ([-1, -1, 0, 1], [0, 1, -1, -1]):
        rank = layer_of(expert_map=torch.tensor(expert_map, dtype=torch.int32))
        for name, tensor in held.items():
            local = tensor[torch.tensor(expert_map) >= 0]
            setattr(rank, name, torch.nn.Parameter(local, requires_grad=False))
        method = method_of(rank)
        method.process_weights_after_loading(rank)
        part = method.apply(rank, inputs, weights, ids, None, None).float()
        assert part.abs().sum() > 0
        total += part
    expected = expected_of(inputs, weights, ids, w13, w2)
    assert (total - expected).abs().mean() < 2 * TOLERANCE * expected.abs().mean()


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
        method_of(layer_of(**changes))


def test_blocks_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"weight blocks \[64, 128\]"):
        method_of(layer_of(), block=(64, 128))
