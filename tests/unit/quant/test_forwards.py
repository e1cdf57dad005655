"""A trainer computes PEFT's adapters as the engine does, and their gradients pass straight through.

That this is vLLM's arithmetic is tested against engines, tests/engine/test_adapters.py.
"""

from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoHaConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from rollout_service.config import ServiceConfig
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.fake_quant import fake_quant
from tests.support.models import make_model

RECIPE = TrainerRecipe(weights="fp8_block", quantized=("layer.weight",))


def adapted(dtype: torch.dtype = torch.bfloat16) -> tuple[PeftModel, Any]:
    """A model of one layer with an adapter of random matrices in fp32, PEFT's default, and the layer."""
    torch.manual_seed(0)
    base = nn.Sequential()
    base.add_module("layer", nn.Linear(256, 384, bias=False, dtype=dtype))
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, target_modules=["layer"]))
    layer = model.get_submodule("base_model.model.layer")
    nn.init.normal_(layer.lora_B["default"].weight)
    return model, layer


def test_an_fp32_model_under_autocast_computes_the_same():
    in_fp32, _ = adapted(torch.float32)
    in_bf16, layer = adapted()
    layer.base_layer.weight.data = in_fp32.get_submodule("base_model.model.layer").base_layer.weight.data.bfloat16()
    hidden = torch.randn(64, 256).bfloat16()
    own = in_bf16(hidden)
    with torch.no_grad(), fake_quant(in_bf16, RECIPE, roundings=False):
        expected = in_bf16(hidden)
    with torch.no_grad(), fake_quant(in_fp32, RECIPE, roundings=False), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(in_fp32(hidden.float()), expected)
    assert torch.equal(in_bf16(hidden), own) and not torch.equal(own, expected)


def test_gradients_are_those_of_the_rounded_matrices():
    model, layer = adapted()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    hidden = torch.randn(2, 5, 256).bfloat16().requires_grad_()
    coefficients = torch.randn(2, 5, 384).bfloat16()
    with fake_quant(model, RECIPE, roundings=False):
        (model(hidden) * coefficients).sum().backward()
        found, hidden.grad = hidden.grad, None
        with model.disable_adapter():
            (model(hidden) * coefficients).sum().backward()
    assert found is not None and hidden.grad is not None and layer.base_layer.weight.grad is None
    rounded_a, rounded_b = a.detach().bfloat16().float(), (b.detach().bfloat16() * 1.5).float()
    inputs, gradient = hidden.detach().float().flatten(0, 1), coefficients.float().flatten(0, 1)
    buffer = (inputs @ rounded_a.T).bfloat16().float()
    torch.testing.assert_close(b.grad, 1.5 * gradient.T @ buffer)
    torch.testing.assert_close(a.grad, (gradient @ rounded_b).T @ inputs)
    of_adapter = (gradient @ rounded_b @ rounded_a).view_as(hidden)
    torch.testing.assert_close(found.float(), hidden.grad.float() + of_adapter, rtol=2**-6, atol=0.1)


def test_every_matrix_of_an_adapted_model_learns(tmp_path):
    folder = make_model(tmp_path, "qwen3")
    quantized = tuple(ServedModel.load(folder).plan(ServiceConfig().quant).quantized)
    recipe = TrainerRecipe(weights="fp8_block", quantized=quantized, kernels="cuda_compiled")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"),
    )
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(learning) == 2 * 2 * 7
    torch.manual_seed(0)
    for name, parameter in learning.items():
        nn.init.normal_(parameter, std=0.1 if ".lora_B." in name else 0.06)
    tokens = torch.randint(3, 128, (2, 24))

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in learning.items() if parameter.grad is not None}

    plain = gradients()
    with fake_quant(model, recipe):
        found = gradients()
    assert found.keys() == learning.keys()
    for name, gradient in found.items():
        angle = torch.cosine_similarity(gradient.flatten(), plain[name].flatten(), dim=0)
        assert angle > 0.8, (name, angle)


@pytest.mark.parametrize(
    ("layer", "config", "why"),
    [
        (nn.Linear, LoraConfig(use_dora=True), "has DoRA, a bias or another variant"),
        (nn.Linear, LoraConfig(lora_bias=True), "has DoRA, a bias or another variant"),
        (nn.Linear, AdaLoraConfig(total_step=2), r"is PEFT's \w+: only LoRA of linear layers is known"),
        (nn.Linear, LoHaConfig(), r"is PEFT's \w+: only LoRA of linear layers is known"),
        (nn.Embedding, LoraConfig(), "is PEFT's Embedding: only LoRA of linear layers is known"),
    ],
)
def test_adapters_of_another_kind_are_refused(layer, config, why):
    base = nn.Sequential()
    base.add_module("layer", layer(256, 384))
    config.target_modules = {"layer"}
    with pytest.raises(ValueError, match=rf"base_model\.model\.layer {why}"):
        fake_quant(get_peft_model(base, config), RECIPE)


def test_a_merged_adapter_is_refused():
    model, _ = adapted()
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into its weight, .* call unmerge_adapter\(\) first"):
        fake_quant(model, RECIPE)
