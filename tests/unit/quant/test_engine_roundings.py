"""A trainer's model rounds where vLLM does, differentiates what it computes, and is its own again afterwards.

That these are the places where vLLM rounds is tested against engines, tests/engine/test_trainer_as_engine.py.
"""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rollout_service.compat.transformers_internals import AttentionFunction, registered_attention
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.engine_roundings import EngineRoundings, engine_roundings
from rollout_service.quant.forwards import Forwards
from tests.support.models import FAMILIES

KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
TOKENS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))


def made(family: str, dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    config = FAMILIES[family]()
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    model.zero_grad()
    model(TOKENS, labels=TOKENS).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def outputs(model: PreTrainedModel, *names: str) -> list[torch.Tensor]:
    """Of these modules in one forward pass."""
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda _module, _args, output: seen.update({name: output[0] if isinstance(output, tuple) else output})

    handles = [model.model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    logits(model)
    for handle in handles:
        handle.remove()
    return [seen[name] for name in names]


def normalized(summed: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    """RMSNorm of a sum in fp32, rounded to BF16 before and after the weight."""
    deviation = (summed.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    return (summed / deviation).bfloat16() * norm.weight


class TestForward:
    @pytest.mark.parametrize(
        ("family", "attention"), [*((family, "sdpa") for family in KNOWN), ("llama", "eager"), ("qwen3_moe", "eager")]
    )
    def test_bf16_changes_until_the_end_and_fp32_does_not(self, family, attention):
        model = made(family, attention=attention)
        before = logits(model)
        with engine_roundings(model):
            inside = logits(model)
        assert inside.dtype == torch.bfloat16
        assert not torch.equal(inside, before)
        assert (inside - before).abs().median() < 0.02  # routers decide otherwise for some tokens
        assert torch.equal(logits(model), before)
        assert not any("forward" in vars(module) for module in model.modules())
        before = logits(model.float())
        with engine_roundings(model):
            assert torch.equal(logits(model), before)

    def test_sums_are_normalized_before_they_are_rounded(self):
        model = made("llama")
        names = ("embed_tokens", "layers.0.self_attn", "layers.0.post_attention_layernorm", "layers.0.mlp")
        with engine_roundings(model):
            embedded, attended, normed, fed, second = outputs(model, *names, "layers.1.input_layernorm")
        residual = embedded.float() + attended.float()
        assert torch.equal(normed, normalized(residual, model.model.layers[0].post_attention_layernorm))
        expected = residual.bfloat16().float() + fed.float()
        assert torch.equal(second, normalized(expected, model.model.layers[1].input_layernorm))

    def test_cuda_kernels_round_the_sum_before_the_norm_which_rounds_once(self):
        model = made("qwen3")
        names = ("embed_tokens", "layers.0.self_attn", "layers.0.post_attention_layernorm", "layers.0.self_attn.q_proj")
        with engine_roundings(model, kernels="cuda_eager"):
            embedded, attended, normed, projected, queries = outputs(model, *names, "layers.0.self_attn.q_norm")
        layer = model.model.layers[0]

        def once(hidden: torch.Tensor, norm: nn.Module) -> torch.Tensor:
            deviation = (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
            return hidden / deviation * norm.weight.float()

        summed = (embedded.float() + attended.float()).bfloat16().float()
        of_sum = once(summed, layer.post_attention_layernorm)
        of_queries = once(projected.float().view_as(queries), layer.self_attn.q_norm)
        # one rounding apart at most: the reference divides where the kernel multiplies
        torch.testing.assert_close(normed.float(), of_sum, rtol=2**-8, atol=0)
        torch.testing.assert_close(queries.float(), of_queries, rtol=2**-8, atol=0)
        assert (normed == of_sum.bfloat16()).float().mean() > 0.99

    @pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral"])
    def test_on_a_gpu_the_weights_of_experts_are_not_rounded(self, family):
        model, weights = made(family), list[torch.Tensor]()
        router = model.model.layers[0].mlp.gate
        with engine_roundings(model, kernels="cuda_eager"):
            hook = router.register_forward_hook(lambda _module, _inputs, output: weights.append(output[1]))
            logits(model)
            hook.remove()
        assert weights[0].dtype == torch.float32
        if getattr(router, "norm_topk_prob", True):
            torch.testing.assert_close(weights[0].sum(-1), torch.ones(TOKENS.numel()))

    def test_rotated_queries_and_keys_are_rounded_once_and_attention_is_in_fp32(self):
        model = made("llama")
        seen: list[torch.Tensor] = []

        def recording(own: AttentionFunction | None) -> AttentionFunction:
            def attention(module: nn.Module, query: torch.Tensor, *args: object, **kwargs: object) -> object:
                seen.append(query)
                return own(module, query, *args, **kwargs)

            return attention

        with registered_attention("sdpa", recording), engine_roundings(model):
            projected, attended = outputs(model, "layers.0.self_attn.q_proj", "layers.0.self_attn")
        query = projected.view(2, 24, 4, 64).transpose(1, 2).float()
        angles = torch.outer(torch.arange(24.0), 10000 ** (-torch.arange(0, 64, 2) / 64))
        cos, sin = angles.cos().bfloat16().float(), angles.sin().bfloat16().float()
        left, right = query.chunk(2, -1)
        rotated = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        assert seen[0].dtype == torch.float32
        assert torch.equal(seen[0], rotated.bfloat16().float())
        assert attended.dtype == torch.bfloat16

    def test_a_kv_cache_changes_nothing(self):
        model = made("qwen3")
        with engine_roundings(model), torch.no_grad():
            whole = model(TOKENS, use_cache=False).logits
            begun = model(TOKENS[:, :20], use_cache=True)
            rest = model(TOKENS[:, 20:], past_key_values=begun.past_key_values).logits
        torch.testing.assert_close(rest, whole[:, 20:], atol=0.02, rtol=0)

    def test_models_of_one_kernel_end_in_any_order(self):
        policy, reference = made("llama"), made("qwen3")
        before = logits(reference)
        first, second = engine_roundings(policy), engine_roundings(reference)
        inside = logits(reference)
        first.remove()
        assert torch.equal(logits(reference), inside)
        second.remove()
        second.remove()
        assert torch.equal(logits(reference), before)

    def test_a_removed_model_can_be_freed(self):
        policy, reference = made("llama"), made("qwen3")
        with engine_roundings(reference):
            engine_roundings(policy).remove()
            weight = weakref.ref(policy.model.layers[0].self_attn.q_proj.weight)
            del policy
            gc.collect()
            assert weight() is None


class TestBackward:
    @pytest.mark.parametrize("family", ["qwen2", "qwen3"])
    def test_gradients_are_those_of_the_model_in_fp32(self, family):
        model, exact = made(family), made(family, torch.float32)
        exact.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
        with engine_roundings(model):
            found = gradients(model)
        for (name, _), of_bf16, of_fp32 in zip(model.named_parameters(), found, gradients(exact), strict=True):
            angle = torch.cosine_similarity(of_bf16.flatten().float(), of_fp32.flatten(), dim=0)
            assert angle > 0.99, (name, angle)

    def test_gradient_checkpointing_gives_the_same(self):
        model = made("qwen3").train()
        with engine_roundings(model):
            expected = gradients(model)
            model.gradient_checkpointing_enable()
            found = gradients(model)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("model", "recipe", "why"),
    [
        (GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2)), None, "unknown roundings of vLLM for GPT2Model"),
        ("deepseek_v3", None, "for DeepseekV3DecoderLayer: known are LlamaDecoderLayer"),
        (nn.Linear(2, 2), None, "Linear holds no transformers model"),
        ("llama", TrainerRecipe(weights="none", kv_cache="fp8_e4m3"), "KV cache is FP8"),
    ],
)
def test_what_is_not_known_is_refused(model, recipe, why):
    with pytest.raises(ValueError, match=why):
        engine_roundings(made(model) if isinstance(model, str) else model, recipe)


class TestForwards:
    def test_a_forward_that_others_had_given_is_there_again(self):
        layer = nn.Linear(2, 2)
        others = layer.forward = lambda hidden: hidden + 1
        forwards = Forwards({layer: lambda hidden: hidden * 2})
        assert layer(torch.tensor(3)) == 6
        forwards.remove()
        assert layer.forward is others

    def test_a_forward_that_others_have_given_since_is_not_lost(self):
        layers = nn.Linear(2, 2), nn.Linear(2, 2)
        forwards = Forwards({layer: lambda hidden: hidden * 2 for layer in layers})
        ours = layers[1].forward
        layers[1].forward = lambda hidden: ours(hidden) + 1
        with pytest.raises(RuntimeError, match="the forward of a Linear was replaced again"):
            forwards.remove()
        assert [layer(torch.tensor(3)) for layer in layers] == [6, 7]
        layers[1].forward = ours
        forwards.remove()
        assert not any("forward" in vars(layer) for layer in layers)

    def test_calls_may_nest(self):
        model = made("llama")
        before = logits(model)
        outer: EngineRoundings = engine_roundings(model)
        inside = logits(model)
        with engine_roundings(model):
            assert torch.equal(logits(model), inside)
        assert torch.equal(logits(model), inside)
        outer.remove()
        assert torch.equal(logits(model), before)
