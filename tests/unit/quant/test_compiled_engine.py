"""A trainer's model computes what compiled engines compute, bit for bit, and not without any of their steps."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout_service.config import ServiceConfig
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.engine_roundings import EngineRoundings, engine_roundings
from rollout_service.quant.fake_quant import FakeQuant, fake_quant
from tests.support.models import make_model
from tests.unit.quant.compiled_engine import CompiledEngine, Step

TOKENS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))
STEPS: dict[tuple[str, bool], tuple[Step, ...]] = {
    ("qwen3", True): ("norm", "floors", "qk_norm", "swiglu"),
    ("qwen2", True): ("norm", "floors", "swiglu"),
    ("llama", True): ("norm", "floors", "swiglu"),
    ("qwen3_moe", True): ("norm", "qk_norm", "residual"),
    ("qwen3", False): ("qk_norm", "residual"),
    ("qwen2", False): ("residual",),
    ("qwen3_moe", False): ("qk_norm", "residual"),
}
"""Family and whether the engine is FP8 → its steps."""


@pytest.fixture(params=STEPS, ids=lambda case: f"{case[0]}-{'fp8' if case[1] else 'bf16'}")
def case(request: pytest.FixtureRequest) -> tuple[str, bool]:
    found: tuple[str, bool] = request.param
    return found


def saved(folder: Path, family: str) -> PreTrainedModel:
    """The family's model, with norms and biases other than 1 and 0, and activations that reach the floor of scales."""
    model = AutoModelForCausalLM.from_pretrained(make_model(folder, family), dtype=torch.bfloat16).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
        for layer in model.model.layers:
            if hasattr(layer.mlp, "up_proj"):
                layer.mlp.up_proj.weight *= 2**-9
                layer.mlp.down_proj.weight *= 2**9
    return model


def as_engine(model: PreTrainedModel, folder: Path, fp8: bool) -> AbstractContextManager[FakeQuant | EngineRoundings]:
    if not fp8:
        return engine_roundings(model, TrainerRecipe(weights="none", kernels="cuda_compiled"))
    served = ServedModel.load(folder)
    quantized = tuple(served.plan(ServiceConfig().quant).quantized)
    recipe = TrainerRecipe(weights="fp8_block", quantized=quantized, experts=served.experts, kernels="cuda_compiled")
    return fake_quant(model, recipe)


def test_logits_are_those_of_the_compiled_engine(tmp_path, case):
    family, fp8 = case
    model = saved(tmp_path, family)
    with torch.no_grad(), as_engine(model, tmp_path, fp8):
        found = model(TOKENS).logits
        expected = CompiledEngine(model, fp8=fp8).logits(TOKENS)
        others = {step: CompiledEngine(model, fp8=fp8, without=step).logits(TOKENS) for step in STEPS[case]}
    assert torch.equal(found, expected)
    assert [step for step, logits in others.items() if torch.equal(logits, found)] == []
