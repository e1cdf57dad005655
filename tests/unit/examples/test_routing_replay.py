"""Routing replay: a transformers model takes the experts that it is given, and learns through its own router."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from examples.routing_replay import replay_batch, replayed
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.routed_experts import RoutedExperts
from tests.unit.fleet.completions import completion_of

LAYERS, TOPK, NUM_EXPERTS = 3, 2, 8
TOKENS = torch.randint(32, (4, 48), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Its second layer is dense; its routers hardly prefer anything."""
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=NUM_EXPERTS, num_experts_per_tok=TOPK,
        norm_topk_prob=True, mlp_only_layers=[1],
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@contextmanager
def chosen(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """What the forward pass within chooses: [B, T, layers, topk], zeros for the dense layer."""
    experts = torch.zeros(*TOKENS.shape, LAYERS, TOPK, dtype=torch.int64)

    def note(index: int) -> torch.utils.hooks.RemovableHandle:
        def hook(module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
            experts[:, :, index] = output[2].unflatten(0, TOKENS.shape)

        return model.model.layers[index].mlp.gate.register_forward_hook(hook)

    handles = [note(0), note(2)]
    yield experts
    for handle in handles:
        handle.remove()


ALL = torch.ones(TOKENS.shape, dtype=torch.bool)


def test_its_own_choice_replayed_changes_no_bit(model):
    with torch.no_grad(), chosen(model) as own:
        plain = model(TOKENS).logits
    with torch.no_grad(), replayed(model, own, ALL):
        assert torch.equal(model(TOKENS).logits, plain)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, plain)


def test_another_choice_is_taken_for_the_tokens_that_are_known(model):
    others = torch.rand(*TOKENS.shape, LAYERS, NUM_EXPERTS).topk(TOPK, dim=-1).indices
    known = ALL.clone()
    known[0, 5:] = False
    with torch.no_grad(), chosen(model) as own:
        plain = model(TOKENS).logits
    with torch.no_grad(), replayed(model, others, known), chosen(model) as taken:
        made = model(TOKENS).logits
    assert torch.equal(taken[known][:, [0, 2]], others[known][:, [0, 2]])
    # layer 0 sees the same hidden states, so what is not known there is the router's own choice
    assert torch.equal(taken[~known][:, 0], own[~known][:, 0])
    assert not torch.allclose(made, plain, atol=1e-3)


def test_a_model_in_another_dtype_comes_closer_with_the_others_choice(model):
    """As a trainer does to an engine: some tokens here lie so close to two experts that BF16 decides otherwise."""
    rounded = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).eval()
    rounded.load_state_dict(model.state_dict())
    with torch.no_grad(), chosen(rounded) as theirs:
        engine = rounded(TOKENS).logits.float().log_softmax(-1)
    with torch.no_grad(), chosen(model) as own:
        plain = (model(TOKENS).logits.log_softmax(-1) - engine).abs()
    assert not torch.equal(own, theirs)
    with torch.no_grad(), replayed(model, theirs, ALL):
        replay = (model(TOKENS).logits.log_softmax(-1) - engine).abs()
    assert replay.max() < plain.max() / 2


def test_the_router_learns_through_the_weights_of_what_it_was_given(model):
    others = torch.rand(*TOKENS.shape, LAYERS, NUM_EXPERTS).topk(TOPK, dim=-1).indices
    router = model.model.layers[0].mlp.gate.weight
    with replayed(model, others, ALL):
        model(TOKENS, labels=TOKENS).loss.backward()
    assert router.grad is not None and router.grad.abs().sum() > 0
    model.zero_grad()


@pytest.mark.parametrize(
    ("shape", "says"),
    [((4, 48, 2, 2), "experts of 2 layers, 2 a token, for a model of 3"), ((4, 48, 3, 4), "4 a token")],
)
def test_experts_of_another_model_are_refused(model, shape, says):
    with pytest.raises(ValueError, match=says), replayed(model, torch.zeros(shape, dtype=torch.int64), ALL):
        pass


def test_other_tokens_and_models_without_experts_are_refused(model):
    own = torch.zeros(*TOKENS.shape, LAYERS, TOPK, dtype=torch.int64)
    with (
        torch.no_grad(),
        replayed(model, own, ALL),
        pytest.raises(ValueError, match=r"of 48 tokens, and experts .* 192"),
    ):
        model(TOKENS[:1])
    with pytest.raises(ValueError, match="has no layers with Qwen2MoeTopKRouter"), replayed(model.lm_head, own, ALL):
        pass


def test_a_batch_is_padded_and_its_last_tokens_are_not_known():
    def rollout(prompt: int, tokens: int) -> Rollout:
        held = np.arange((prompt + tokens - 1) * 6, dtype=np.uint8).reshape(-1, 3, 2)
        made = completion_of([5] * tokens).model_copy(update={"routed_experts": RoutedExperts.of(held, 0)})
        return Rollout(request_id="r", prompt_token_ids=(1,) * prompt, completions=(made,), replica_id="a")

    experts, known = replay_batch([rollout(2, 2), rollout(2, 3)])
    assert experts.shape == (2, 5, 3, 2) and experts.dtype == torch.int64
    assert known.tolist() == [[True, True, True, False, False], [True, True, True, True, False]]
    assert experts[1, 3].flatten().tolist() == list(range(18, 24))
    assert replay_batch([rollout(2, 2)], length=8)[0].shape[1] == 8
    with pytest.raises(ValueError, match=r"has 5 tokens, and length=4"):
        replay_batch([rollout(2, 3)], length=4)
