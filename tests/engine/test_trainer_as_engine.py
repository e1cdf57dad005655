"""A trainer with ``fake_quant`` or ``engine_roundings`` has the logprobs of an engine with its weights and adapter."""

import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rollout_service.engine.cpu.processor import request_amx
from rollout_service.protocol.upload import Kernels
from rollout_service.quant.engine_roundings import engine_roundings
from rollout_service.quant.fake_quant import fake_quant
from tests.engine.test_adapters import MAX_LIVE, Adapted
from tests.support.adapters import adapter_tensors
from tests.support.models import random_weights
from tests.support.one_engine import OneEngine, running

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEAN = 2e-3
"""Bound on the mean of |Δ| of a token's logprob, over 256 tokens; otherwise it is 0.008 in BF16 and 0.04 in FP8. Seen:
0 for dense models, up to 4e-4 with experts. How many tokens an expert gets at once is up to the batch, and with the
shape of a product the last bits of its sums change, in the engine and here; one may end on another FP8 code."""


def logprobs(model: torch.nn.Module, prompt: tuple[int, ...], completion: tuple[int, ...]) -> torch.Tensor:
    """Of the completion's tokens; logits as the model makes them, their softmax in fp32 as in the engine."""
    with torch.no_grad():
        tokens = torch.tensor([prompt + completion], device=DEVICE)
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float().cpu()
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


async def differences(one: OneEngine, has_adapter: bool, kernels: Kernels | None = None) -> tuple[float, float]:
    """Mean |Δ| of a trainer in BF16 from the engine, which has an update of its: as it is, and computing as it does."""
    weights = random_weights(one.config.model.path, seed=1)
    base = await one.update(1, weights)
    trainer = one.config.model.path.parent / "trainer-1"
    shutil.copy(one.config.model.path / "config.json", trainer)
    model = AutoModelForCausalLM.from_pretrained(trainer, dtype=torch.bfloat16).eval().to(DEVICE)
    if has_adapter:
        adapted = Adapted(one, base, is_fp8=True)
        # by their whole names: "up_proj" alone would have PEFT adapt the experts of a mixture, too
        modules = {name.partition(".lora_")[0] for name in adapter_tensors(one.config.model.path, 1)}
        targets = sorted(name.removeprefix("base_model.model.") for name in modules)
        await adapted.push("run-a", 1, lora_alpha=6, target_modules=targets)
        model = PeftModel.from_pretrained(model, trainer.with_name("run-a-1"))
        pairs = await adapted.sample("run-a")
    else:
        pairs = await one.sample()

    def difference() -> float:
        found = [logprobs(model, prompt, c.token_ids) - torch.tensor(c.logprobs) for prompt, c in pairs]
        return float(torch.cat(found).abs().mean())

    recipe = await one.ingest.recipe()
    plain = difference()
    imitate = fake_quant if recipe.weights == "fp8_block" else engine_roundings
    with imitate(model, recipe, kernels=kernels):
        return plain, difference()


@pytest.mark.skipif(request_amx(), reason="attention with AMX, which vLLM has here, is not imitated")
@pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16"),
    reason="without AVX512-BF16 vLLM's kernels truncate to BF16 (csrc/cpu/cpu_types_x86.hpp), which is not imitated",
)
@pytest.mark.slow  # tests/unit/quant has its arithmetic, without an engine
@pytest.mark.parametrize(
    ("family", "quant", "has_adapter"),
    [
        ("qwen3_moe", "fp8_block", False),
        ("qwen3_moe", "fp8_block", True),
        ("qwen3", "none", False),
        ("qwen3", "none", True),
        ("llama", "fp8_block", False),
        ("mistral", "fp8_block", False),
        ("mixtral", "fp8_block", False),
        ("qwen2", "fp8_block", False),
        ("qwen2", "fp8_block", True),
        ("qwen2_moe", "fp8_block", False),
        ("qwen3", "fp8_block", False),
        ("qwen3", "fp8_block", True),
    ],
)
async def test_a_trainer_computes_as_the_engine_does(family, quant, has_adapter, tmp_path, monkeypatch):
    adapters = {"max_live": MAX_LIVE if has_adapter else 0, "max_rank": 8}
    async with running(family, tmp_path, monkeypatch, quant=quant, adapters=adapters) as one:
        plain, same = await differences(one, has_adapter)
    assert plain > 3 * MEAN
    assert same < MEAN
