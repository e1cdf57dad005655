"""For what a group's prompt is read once, and how the rest is refused."""

import json
from typing import Any, cast

import pytest
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from rollout_service.config import ServiceConfig
from rollout_service.engine.args import engine_args
from rollout_service.engine.attention.choice import AttentionChoice, AttentionSettings, attention_choice

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 128,
    "use_sliding_window": False,
    "sliding_window": 4096,  # as some of Qwen's say beside it
    "layer_types": ["full_attention"] * 2,
}
HOPPER = (9, 0)


def choose(
    asked: str,
    model: dict[str, Any] | None = None,
    capability: tuple[int, int] | None = HOPPER,
    on_cpu: bool = False,
    **engine: Any,
) -> AttentionChoice:
    config = ServiceConfig.model_validate({"engine": {"attention_backend": asked, **engine}})
    settings = cast(AttentionSettings, QWEN3 | (model or {}))
    return attention_choice(config, settings, on_cpu=on_cpu, capability=capability)


def chosen(asked: str, model: dict[str, Any] | None = None, **given: Any) -> str | None:
    return choose(asked, model, **given).backend


def test_groups_are_a_backend_of_a_plug_in():
    assert chosen("group") == "CUSTOM"
    assert chosen("group", {"num_attention_heads": 64}) == "CUSTOM"  # eight query heads of a KV head
    assert chosen("group", tensor_parallel_size=4) == "CUSTOM"
    assert chosen("group", {"head_dim": 64}) == "CUSTOM"
    assert chosen("group", capability=None) == "CUSTOM"
    usual = {"sliding_window": 512, "use_sliding_window": True, "head_dim": 64}
    assert chosen("TRITON_ATTN", usual) == "TRITON_ATTN"
    with pytest.raises(ValueError, match=r"heads have 96 numbers.*; .*caps its attention's logits"):
        chosen("group", {"attn_logit_softcapping": 50.0, "head_dim": 96})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"capability": (10, 0)}, "needs FlashAttention 3, and the GPU's compute capability is 10.0"),
    ({"model": {"head_dim": 256}}, "heads have 256 numbers"),
    ({"model": {"num_key_value_heads": 32}}, "has 1 query heads for each KV head"),
    ({"model": {"head_dim": 96}}, "heads have 96 numbers, and it is right with 64 and 128"),
    ({"model": {"head_dim": None, "hidden_size": 3072}}, "heads have 96 numbers"),
    ({"model": {"head_dim": None, "hidden_size": None}}, "heads have None numbers"),
    ({"model": {"num_attention_heads": 28, "num_key_value_heads": 4}}, "has 7 query heads for each KV head"),
    ({"model": {"num_attention_heads": None}}, "an unknown number of query heads"),
    ({"tensor_parallel_size": 16}, "has 2 query heads for each KV head"),
    ({"model": {"use_sliding_window": True}}, "the model has a sliding window"),
    ({"extra": {"hf_overrides": {"use_sliding_window": True}}}, "the model has a sliding window"),
    (
        {"model": {"layer_types": ["linear_attention", "full_attention", "sliding_attention"]}},
        "the model has layers of linear_attention",
    ),
    ({"model": {"attn_logit_softcapping": 50.0}}, "caps its attention's logits"),
    ({"deterministic": True}, "engine.deterministic is true"),
    ({"extra": {"speculative_config": {"method": "ngram"}}}, "decodes one token of a sequence a step"),
    ({"extra": {"decode_context_parallel_size": 2}}, "engine.extra.decode_context_parallel_size cuts them"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED)
def test_what_it_cannot_do_is_an_error_when_asked_for_and_flash_attention_by_itself(given, why):
    with pytest.raises(ValueError, match=r"engine.attention_backend is group: .*: set it to auto") as refused:
        chosen("group", **given)
    assert why in str(refused.value)
    assert chosen("auto", **given) == "FLASH_ATTN"


def test_auto_takes_it_for_models_that_were_measured():
    for kind in ("qwen3", "qwen3_moe"):
        assert choose("auto", {"model_type": kind}) == AttentionChoice(
            "CUSTOM", f"auto takes it for {kind}, whose engines were measured with it on one GPU"
        )
    llama = choose("auto", {"model_type": "llama", "head_dim": 64})
    assert llama.backend == "FLASH_ATTN"
    assert llama.why == (
        "auto takes it, and not group: no engine of llama was measured with it; no engine with heads of 64 numbers was "
        "measured with it"
    )
    two = choose("auto", tensor_parallel_size=2)
    assert two.backend == "FLASH_ATTN" and "no engine of 2 GPUs was measured with it" in two.why


def test_vllm_picks_where_there_is_no_choice():
    assert choose("auto", on_cpu=True) == AttentionChoice(None, "the CPU has one kernel")
    latent = {"kv_lora_rank": 512}
    assert choose("auto", latent) == AttentionChoice(None, "vLLM picks the one for latent attention")
    assert chosen("auto", latent, on_cpu=True) == "CPU_MLA"
    for given in ({"model": latent}, {"on_cpu": True}):
        with pytest.raises(ValueError, match=r"engine.attention_backend is group: there is one kernel for the CPU"):
            chosen("group", **given)


def test_an_engine_gets_it_by_the_models_config(tmp_path, monkeypatch):
    shape = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | shape))
    usual, config = (
        ServiceConfig.model_validate({"model": {"path": tmp_path}, "engine": {"attention_backend": asked}})
        for asked in ("auto", "group")
    )
    assert engine_args(usual, (), has_tokenizer=False).attention_backend is None  # and vLLM loads plug-ins for the CPU
    with pytest.raises(ValueError, match=r"engine.attention_backend is group: there is one kernel for the CPU"):
        engine_args(config, (), has_tokenizer=False)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda _: DeviceCapability(9, 0))
    assert engine_args(config, (), has_tokenizer=False).attention_backend == "CUSTOM"
