"""What the mismatch of two columns of logprobs is, and how a model scores tokens."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.mismatch.logprobs import mismatch, score
from rollout_service.protocol.routed_experts import RoutedExperts
from tests.support.models import FAMILIES
from tests.unit.fleet.completions import completion_of


def test_equal_logprobs_have_no_mismatch():
    same = torch.log(torch.tensor([[0.5, 0.25], [0.125, 1.0]]))
    case = mismatch("qwen3", "fp8_block", same, same)
    assert (case["tokens"], case["k1"], case["k3"], case["prob_error"], case["abs_diff_max"]) == (4, 0, 0, 1, 0)


def test_a_token_that_the_engine_takes_for_twice_as_likely():
    reference, engine = torch.log(torch.tensor([[0.25, 0.5]])), torch.log(torch.tensor([[0.5, 0.5]]))
    case = mismatch("qwen3", "fp8_block", reference, engine)
    assert case["k1"] == pytest.approx(math.log(2) / 2)
    assert case["k3"] == pytest.approx((0.5 - 1 + math.log(2)) / 2)
    assert case["prob_error"] == pytest.approx(1.5)
    assert case["abs_diff_max"] == pytest.approx(math.log(2))


def test_a_completion_is_scored_after_its_prompt():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3"](), dtype=torch.float32).eval()
    sampled = [([5, 6, 7], completion_of((9, 8))), ([7, 6, 5], completion_of((8, 8)))]
    found = score(model, sampled)
    for row, (prompt, completion) in zip(found, sampled, strict=True):
        tokens = [*prompt, *completion.token_ids]
        with torch.no_grad():
            whole = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = [float(whole[i - 1, tokens[i]]) for i in (3, 4)]
        assert row.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_completion_is_scored_by_the_experts_that_the_engine_told():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"](), dtype=torch.float32).eval()
    completion = completion_of((9, 8))
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
    plain = score(model, [([5, 6, 7], completion)])
    own = torch.stack(chosen, 1)[:-1].numpy().astype("uint8")
    others = (own + 1) % model.config.num_experts
    for experts, same in ((own, True), (others, False)):
        told = completion.model_copy(update={"routed_experts": RoutedExperts.of(experts, 0)})
        assert torch.equal(score(model, [([5, 6, 7], told)], replay=True), plain) is same
