"""A trainer's model computes what compiled engines compute, bit for bit, and not without any of their steps."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout_service.config import ServiceConfig
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.engine_roundings import EngineRoundings, engine_roundings
from rollout_service.quant.fake_quant import FakeQuant, fake_quant
from tests.support.models import make_model
from tests.unit.quant.compiled_engine import CompiledEngine, Step

TOKENS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))
STEPS: dict[tuple[str, str], tuple[Step, ...]] = {
    ("qwen3", "fp8"): ("norm", "floors", "qk_norm", "swiglu"),
    ("qwen2", "fp8"): ("norm", "floors", "swiglu"),
    ("llama", "fp8"): ("norm", "floors", "swiglu"),
    ("qwen3_moe", "fp8"): ("norm", "qk_norm", "residual"),
    ("qwen3", "bf16"): ("qk_norm", "residual"),
    ("qwen2", "bf16"): ("residual",),
    ("qwen3_moe", "bf16"): ("qk_norm", "residual"),
    ("qwen3", "fp8 with adapters"): ("qk_norm", "residual", "unfused"),
    ("qwen3", "fp8 beside adapters"): ("qk_norm", "residual", "unfused"),
    ("qwen2", "fp8 with adapters"): ("residual", "unfused"),
    ("qwen3_moe", "fp8 with adapters"): ("qk_norm", "residual", "unfused"),
    ("qwen3", "bf16 with adapters"): ("qk_norm", "residual"),
}
"""Family and engine → its steps."""


@pytest.fixture(params=STEPS, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
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


def adapted(model: PreTrainedModel) -> PeftModel:
    """The same modules with an adapter in some of the layers; the engine has the others ready for one, too."""
    # PEFT adapts routed experts by these names, too, which the service refuses
    mlp = [] if hasattr(model.model.layers[0].mlp, "experts") else ["up_proj", "down_proj"]
    made = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", *mlp]))
    for name, parameter in made.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return made.eval()


def as_engine(
    model: torch.nn.Module, folder: Path, fp8: bool, adapters: bool
) -> AbstractContextManager[FakeQuant | EngineRoundings]:
    if not fp8:
        return engine_roundings(model, TrainerRecipe(weights="none", kernels="cuda_compiled"))
    served = ServedModel.load(folder)
    quantized = tuple(served.plan(ServiceConfig().quant).quantized)
    recipe = TrainerRecipe(weights="fp8_block", quantized=quantized, experts=served.experts, kernels="cuda_compiled")
    return fake_quant(model, recipe.model_copy(update={"adapters": adapters}))


def test_logits_are_those_of_the_compiled_engine(tmp_path, case):
    family, engine = case
    model = saved(tmp_path, family)
    fp8, beside = engine.startswith("fp8"), "beside" in engine
    trainer = adapted(model) if "with" in engine else model

    def logits_of_engine(without: Step | None = None) -> torch.Tensor:
        return CompiledEngine(model, fp8=fp8, without=without, adapters=beside).logits(TOKENS)

    with torch.no_grad(), as_engine(trainer, tmp_path, fp8, beside):
        found = trainer(TOKENS).logits
        expected = logits_of_engine()
        others = {step: logits_of_engine(step) for step in STEPS[case]}
    assert torch.equal(found, expected)
    assert [step for step, logits in others.items() if torch.equal(logits, found)] == []
