"""Choice of vLLM's attention backend: the models and settings that read a group's prompt once, and all others."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from rollout_service.config import ServiceConfig

FLASH_ATTENTION_3 = 9
"""Major compute capability of the GPUs with FlashAttention 3: Hopper."""
GROUP = "CUSTOM"
"""vLLM's name for a backend registered by a plug-in."""
SHOWN = {GROUP: "group"}
"""vLLM's names mapped to those in ``engine.attention_backend``, where they differ."""
MEASURED_MODELS = ("qwen3", "qwen3_moe")
"""The ``model_type`` values for which ``auto`` chooses group attention. Their whole engine was measured on one GPU."""
HEAD_SIZES = (64, 128)
"""Supported head sizes, tested by ``tests/gpu/test_group_attention.py``."""
MEASURED_HEAD_SIZE = 128
"""Head size of the measured models."""
QUERIES_PER_KV_HEAD = (4, 8)
"""Supported numbers of query heads per KV head. Measured for the attention alone."""
MIN_SHARED_TOKENS = 512
"""Minimum number of shared tokens. Shorter shared prefixes were not measured, and each sequence reads them itself."""
_NO_CHOICE = "there is one kernel for the CPU, and vLLM picks the one for latent attention"


class AttentionSettings(TypedDict, total=False):
    """The fields of config.json that this module reads."""

    model_type: str
    hidden_size: int
    head_dim: int | None
    num_attention_heads: int
    num_key_value_heads: int
    sliding_window: int | None
    use_sliding_window: bool
    layer_types: list[str]
    attn_logit_softcapping: float | None
    kv_lora_rank: int | None


class _Settings(AttentionSettings, total=False):
    text_config: AttentionSettings


def attention_settings(folder: Path) -> AttentionSettings:
    """Return the settings of a model's language part."""
    settings: _Settings = json.loads((folder / "config.json").read_text())
    return settings.get("text_config") or settings


def head_size(model: AttentionSettings) -> int | None:
    """Return the attention head size, or None if config.json lacks the usual fields."""
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    return model.get("head_dim") or (hidden // heads if hidden and heads else None)


def has_latent_attention(model: AttentionSettings) -> bool:
    """Return True if the model uses latent attention (MLA)."""
    return "kv_lora_rank" in model


@dataclass(frozen=True)
class AttentionChoice:
    """The attention kernels of an engine."""

    backend: str | None
    """vLLM's backend name. None: vLLM chooses."""
    why: str
    """The reason, for logs, ``inspect`` and the fleet."""


def attention_choice(
    config: ServiceConfig, model: AttentionSettings, *, on_cpu: bool = False, capability: tuple[int, int] | None = None
) -> AttentionChoice:
    """Return the attention backend of an engine, with the reason.

    Raises ValueError if the platform or the model does not support the configured backend.

    Args:
        config: the service's configuration.
        model: the model's config.json.
        on_cpu: True on the CPU.
        capability: the GPU's compute capability. None: unknown.
    """
    asked, latent = config.engine.attention_backend, has_latent_attention(model)
    if latent and on_cpu:
        # vLLM's AMX variant frees kv_b_proj, so it cannot load an update
        return AttentionChoice("CPU_MLA", "of the CPU's kernels for latent attention, the one that takes updates")
    if latent or on_cpu:
        if asked != "auto":
            raise ValueError(f"engine.attention_backend is {asked}: {_NO_CHOICE}: set it to auto")
        return AttentionChoice(None, "vLLM picks the one for latent attention" if latent else "the CPU has one kernel")
    # FlashAttention and our backend read the live KV scales at each call; FlashInfer freezes them at the first call
    if asked not in ("auto", "group"):
        return AttentionChoice(asked, f"engine.attention_backend is {asked}")
    against = [*_against_groups(config, model, capability)]
    if asked == "group":
        if against:
            raise ValueError(
                f"engine.attention_backend is group: {'; '.join(against)}: set it to auto, which takes FlashAttention"
            )
        return AttentionChoice(GROUP, "engine.attention_backend is group")
    if against := [*against, *_not_measured(config, model)]:
        return AttentionChoice("FLASH_ATTN", f"auto takes it, and not group: {'; '.join(against)}")
    kind = model.get("model_type")
    return AttentionChoice(GROUP, f"auto takes it for {kind}, whose engines were measured with it on one GPU")


def _not_measured(config: ServiceConfig, model: AttentionSettings) -> Iterator[str]:
    if (kind := model.get("model_type")) not in MEASURED_MODELS:
        yield f"no engine of {kind} was measured with it"
    if (size := head_size(model)) in HEAD_SIZES and size != MEASURED_HEAD_SIZE:
        yield f"no engine with heads of {size} numbers was measured with it"
    # each rank groups its own heads independently: correct, but not measured
    if config.engine.tensor_parallel_size != 1:
        yield f"no engine of {config.engine.tensor_parallel_size} GPUs was measured with it"


def _against_groups(
    config: ServiceConfig, model: AttentionSettings, capability: tuple[int, int] | None
) -> Iterator[str]:
    engine, extra = config.engine, config.engine.extra
    overrides = extra.get("hf_overrides")
    given = {**model, **(overrides if isinstance(overrides, dict) else {})}
    if capability is not None and capability[0] != FLASH_ATTENTION_3:
        yield f"it needs FlashAttention 3, and the GPU's compute capability is {capability[0]}.{capability[1]}, not 9.0"
    if (size := head_size(model)) not in HEAD_SIZES:
        yield f"the model's heads have {size} numbers, and it is right with {_join_with_and(HEAD_SIZES)}"
    if (ratio := _queries_per_kv_head(model, engine.tensor_parallel_size)) not in QUERIES_PER_KV_HEAD:
        found = "an unknown number of" if ratio is None else f"{ratio:g}"
        measured = _join_with_and(QUERIES_PER_KV_HEAD)
        yield f"the model has {found} query heads for each KV head, and it was measured with {measured}"
    if given.get("sliding_window") and given.get("use_sliding_window", True):
        yield "the model has a sliding window"
    whole = {"full_attention"} | (set() if given.get("use_sliding_window", True) else {"sliding_attention"})
    if others := sorted({*(model.get("layer_types") or ())} - whole):
        yield f"the model has layers of {', '.join(others)}"
    if model.get("attn_logit_softcapping"):
        yield "the model caps its attention's logits"
    if engine.deterministic:
        yield "results depend on who shares the batch, and engine.deterministic is true"
    if extra.get("speculative_config") is not None:
        yield "it decodes one token of a sequence a step, and engine.extra.speculative_config asks for more"
    if extra.get("decode_context_parallel_size", 1) != 1:
        yield "it reads whole sequences, and engine.extra.decode_context_parallel_size cuts them"


def _queries_per_kv_head(model: AttentionSettings, ranks: int) -> float | None:
    """Return the number of query heads per KV head on each rank. Each rank has at least one KV head."""
    heads = model.get("num_attention_heads")
    if not heads:
        return None
    kv_heads = model.get("num_key_value_heads") or heads
    return heads / ranks / max(1, kv_heads / ranks)


def _join_with_and(numbers: tuple[int, ...]) -> str:
    return " and ".join(map(str, numbers))
