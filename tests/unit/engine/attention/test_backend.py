"""What the backend says to vLLM, asked as vLLM asks it when it is chosen."""

from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from rollout_service.engine.attention.backend import GroupAttentionBackend, GroupAttentionImpl
from rollout_service.engine.plugin import register

USUAL: dict[str, Any] = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64}


def against(capability: tuple[int, int] = (9, 0), **asked: Any) -> list[str]:
    """Reasons that vLLM would give."""
    config = AttentionSelectorConfig(**(USUAL | asked))
    return GroupAttentionBackend.validate_configuration(
        device_capability=DeviceCapability(*capability), **config._asdict()
    )


def test_the_backend_that_the_plug_in_registers_is_found_by_its_own_name(monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    register()
    try:
        found = AttentionBackendEnum[GroupAttentionBackend.get_name()].get_class()
        assert found is GroupAttentionBackend
        assert found.get_impl_cls() is GroupAttentionImpl
        assert found.get_builder_cls().__mro__[1] is flash_attn.FlashAttentionMetadataBuilder
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_what_was_measured_is_valid():
    assert against() == []
    assert against(block_size=16) == []
    assert against(head_size=64) == []


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"head_size": 96}, "head_size not supported"),
        ({"head_size": 256}, "head_size not supported"),
        ({"capability": (8, 0)}, "compute capability not supported"),
        ({"capability": (10, 0)}, "compute capability not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type AttentionType.ENCODER_ONLY not supported"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
    ],
)
def test_what_it_cannot_do_is_denied_to_vllm(asked, reason):
    assert any(reason in given for given in against(**asked)), against(**asked)


def layer(version: int, monkeypatch: pytest.MonkeyPatch, *, heads: int = 32, **given: Any) -> GroupAttentionImpl:
    """One layer's, where vLLM has that version of FlashAttention."""
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: version)
    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)  # imported for CUDA
    usual = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    return GroupAttentionImpl(heads, 128, 128**-0.5, 8, **(usual | given))


@pytest.mark.parametrize(
    ("version", "given", "what"),
    [
        (2, {}, "FlashAttention 2"),
        (3, {"heads": 56}, "7 query heads of a KV head"),
        (3, {"alibi_slopes": [0.5] * 32}, "ALiBi"),
        (3, {"sliding_window": 128}, "a sliding window"),
        (3, {"logits_soft_cap": 50.0}, "a soft cap of logits"),
        (3, {"sinks": torch.zeros(32)}, "attention sinks"),
    ],
)
def test_a_layer_that_it_cannot_do_is_refused(version, given, what, monkeypatch):
    assert layer(3, monkeypatch).num_queries_per_kv == 4  # what was measured is made
    with pytest.raises(NotImplementedError, match=f"is not there for {what}: set engine.attention_backend: FLASH_ATTN"):
        layer(version, monkeypatch, **given)
