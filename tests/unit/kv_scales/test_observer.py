"""What the observer sees is what a KV cache would be given."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollout_service.errors import InvalidRequest
from rollout_service.kv_scales import KVScales, scales_from_amax
from rollout_service.kv_scales.observer import observe_qkv
from tests.support.key_channels import LOUD, with_key_factors
from tests.support.models import FAMILIES
from tests.unit.kv_scales.small import small_model, tokens
from tests.unit.kv_scales.two_ranks import scales_of

PROJECT = Path(__file__).parents[3]
KERNELS = ("eager", "sdpa")


def expected_amax(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Layer → [3] of q, k and v, projected and rotated here from what goes into each attention layer."""
    inputs: dict[str, torch.Tensor] = {}
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda _m, _a, out, i=i: inputs.__setitem__(str(i), out.detach()))
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return {
        f"model.layers.{i}.self_attn": torch.stack([largest(x, mask) for x in qkv(model, int(i), inputs[i])])
        for i in inputs
    }


@torch.no_grad()
def qkv(model: PreTrainedModel, layer: int, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Each [batch, tokens, heads, head_dim]."""
    attention, config = model.model.layers[layer].self_attn, model.config
    dim = attention.head_dim
    q, k, v = (getattr(attention, f"{x}_proj")(hidden).unflatten(-1, (-1, dim)) for x in "qkv")
    if hasattr(attention, "q_norm"):
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * norm.weight
            for x, norm in ((q, attention.q_norm), (k, attention.k_norm))
        )
    theta = config.rope_parameters["rope_theta"]
    angles = torch.arange(hidden.shape[1])[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    return [rotated(q), rotated(k), v]


def largest(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[mask.bool()].abs().amax()


def closeness(observed: dict, expected: dict[str, torch.Tensor]) -> None:
    assert list(observed) == list(expected)
    for name, amax in observed.items():
        torch.testing.assert_close(torch.as_tensor(amax[-1]).float(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "kernel"), [("llama", "eager"), ("qwen2", "sdpa"), ("qwen3", "sdpa")])
def test_it_sees_q_and_k_rotated_and_normed_and_v_as_projected(family, kernel):
    model, ids = small_model(family, kernel), tokens(0)
    with observe_qkv(model) as observation, torch.no_grad():
        model(ids)
    closeness(observation.amax(), expected_amax(model, ids, torch.ones_like(ids)))
    assert observation.tokens == 24
    with pytest.raises(InvalidRequest, match="measured_with"):
        observation.errors()


def test_masked_positions_do_not_count():
    model, ids = small_model("llama", "sdpa"), tokens(0)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    ids[0, 4:] = 77
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = 0  # RMS-norm takes sizes out again, so make the projections of it large
        model.model.embed_tokens.weight[77, 0] = 1
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[:, 0] = 50
    with observe_qkv(model) as observation, torch.no_grad():
        model(ids, attention_mask=mask)
        model(ids)
        model(ids, attention_mask=torch.zeros_like(mask))
    masked, whole = observation.amax()["model.layers.0.self_attn"]
    assert whole[2] > 2 * masked[2]
    assert observation.tokens == 16 + 24
    expected = expected_amax(model, ids, mask)["model.layers.0.self_attn"]
    torch.testing.assert_close(torch.as_tensor(masked).float(), expected, rtol=1e-5, atol=1e-6)


def test_keys_and_values_are_those_that_a_cache_gets():
    model, ids, cache = small_model("qwen3", "sdpa"), tokens(1), DynamicCache()
    with observe_qkv(model.model) as observation, torch.no_grad():
        model(ids, past_key_values=cache)
    # the backbone alone has the names of the checkpoint, too
    assert list(observation.amax()) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for amax, layer in zip(observation.amax().values(), cache.layers, strict=True):
        assert amax[0, 1] == layer.keys.abs().max()
        assert amax[0, 2] == layer.values.abs().max()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_counts_nothing_twice(reentrant):
    model, ids = small_model("qwen3", "sdpa").train(), tokens(0)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with observe_qkv(model) as observation:
        for _ in range(2):
            model(ids, use_cache=False).logits.float().square().mean().backward()
    assert [len(amax) for amax in observation.amax().values()] == [2, 2]
    closeness(observation.amax(), expected_amax(model, ids, torch.ones_like(ids)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_model_computes_the_same_and_is_left_as_it_was(kernel):
    model, other, ids = small_model("llama", kernel), small_model("qwen3", kernel), tokens(0)
    before = dict(ALL_ATTENTION_FUNCTIONS), model(ids).logits, other(ids).logits
    with observe_qkv(model) as observation:
        assert torch.equal(model(ids).logits, before[1])
        assert torch.equal(other(ids).logits, before[2])
    assert dict(ALL_ATTENTION_FUNCTIONS) == before[0]
    model(ids)
    assert [len(amax) for amax in observation.amax().values()] == [1, 1]


def test_two_ranks_of_fsdp2_agree_on_the_larger_of_each(tmp_path):
    command = [sys.executable, "-m", "tests.unit.kv_scales.two_ranks", str(tmp_path / "store")]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as other:
        mine = scales_of(0, str(tmp_path / "store"))
        theirs, _ = other.communicate(timeout=120)
    assert KVScales.model_validate_json(theirs) == mine
    whole = small_model("qwen3")
    alone = []
    for rank in range(2):
        with observe_qkv(whole) as observation, torch.no_grad():
            whole(tokens(rank))
        alone.append(observation.amax())
    expected = scales_from_amax(alone)
    for name, value in expected.named().items():
        assert mine.named()[name] == pytest.approx(value, rel=1e-4)


def test_what_cannot_be_observed_is_refused():
    with pytest.raises(InvalidRequest, match="no transformers model"), observe_qkv(torch.nn.Linear(2, 2)):
        pass
    latent = AutoModelForCausalLM.from_config(FAMILIES["deepseek_v3"]())
    with pytest.raises(InvalidRequest, match="latent attention"), observe_qkv(latent):
        pass
    model = small_model("llama")
    with observe_qkv(model) as nothing:
        with pytest.raises(InvalidRequest, match="another observation"), observe_qkv(model):
            pass
        with pytest.raises(InvalidRequest, match=r"attention_mask is \[2, 1, 12, 12\]"):
            model(tokens(0), attention_mask=torch.ones(2, 1, 12, 12))
    with pytest.raises(InvalidRequest, match="forward pass"):
        nothing.scales()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_models_with_keys_that_no_fp8_cache_takes_compute_the_same(family):
    model, logits, keys = small_model(family), [], []
    for factor in (1.0, LOUD):
        model.load_state_dict(with_key_factors(model.state_dict(), torch.full((64,), factor)))
        with torch.no_grad(), observe_qkv(model) as observation:
            logits.append(model(tokens(0)).logits)
        keys.append(observation.amax()["model.layers.1.self_attn"][0, 1])
    assert torch.equal(*logits) and keys[1] == LOUD * keys[0]
