"""The demo's policy in the engine's arithmetic: a copy in BF16, whose gradients go to the masters."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.as_engine import AsEngine
from rollout_service.config import ServiceConfig
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.fake_quant import fake_quant


@pytest.fixture
def recipe(tiny_model: Path) -> TrainerRecipe:
    model = ServedModel.load(tiny_model)
    return TrainerRecipe(
        weights="fp8_block",
        quantized=tuple(model.plan(ServiceConfig().quant).quantized),
        experts=model.experts,
    )


def test_it_computes_what_a_bf16_model_under_fake_quant_does(tiny_model, recipe):
    masters = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokens = torch.arange(3, 27).view(2, 12)
    in_bf16 = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    with AsEngine(masters, recipe) as policy, fake_quant(in_bf16, recipe), torch.no_grad():
        expected = in_bf16(tokens).logits.float()
        assert torch.equal(policy.logits(tokens, 12), expected)
        assert torch.equal(policy.logits(tokens, 3), expected[:, -3:])


def test_the_masters_are_stepped_and_computed_anew(tiny_model, recipe):
    masters = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokens = torch.arange(3, 27).view(2, 12)
    optimizer = torch.optim.SGD(masters.parameters(), lr=1e-2)
    losses = []
    with AsEngine(masters, recipe) as policy:
        for _ in range(3):
            optimizer.zero_grad()
            logprobs = policy.logits(tokens[:, :-1], 11).log_softmax(-1)
            loss = -logprobs.gather(-1, tokens[:, 1:, None]).mean()
            loss.backward()
            policy.hand_gradients_over()
            assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in masters.parameters())
            optimizer.step()
            losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
