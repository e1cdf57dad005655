"""For which models and settings a group's prompt is read once, and which backend of vLLM an engine gets for it."""

import logging
from collections.abc import Iterator
from typing import TypedDict

from rollout_service.config import ServiceConfig
from rollout_service.engine.extra import is_batch_invariant
from rollout_service.engine.hardware import FLASH_ATTENTION_3

logger = logging.getLogger(__name__)

GROUP = "CUSTOM"
"""vLLM's name for the backend that a plug-in registers."""
MEASURED_MODELS = ("qwen3",)
"""``model_type`` of models for which ``auto`` takes it: those whose whole engine was measured with it, on one GPU."""
HEAD_SIZES = (128,)
"""Measured, for the attention alone."""
QUERIES_PER_KV_HEAD = (4, 8)
"""Likewise."""
MIN_SHARED_TOKENS = 512
"""Fewer shared tokens were not measured, and are read by each sequence."""


class AttentionSettings(TypedDict, total=False):
    """What is read here of a config.json."""

    model_type: str
    num_attention_heads: int
    num_key_value_heads: int
    sliding_window: int | None
    use_sliding_window: bool
    layer_types: list[str]
    attn_logit_softcapping: float | None


def attention_backend(
    config: ServiceConfig, model: AttentionSettings, head_size: int | None, capability: tuple[int, int] | None
) -> str:
    """vLLM's name of the backend that an engine on a GPU gets; the log says which, and why.

    Args:
        model: its config.json.
        capability: the GPU's compute capability; None: not known.

    Raises ValueError if the configuration asks for groups and something speaks against them.
    """
    asked = config.engine.attention_backend
    if asked not in ("auto", "group"):
        return asked
    against = [*_against_groups(config, model, head_size, capability)]
    if asked == "group":
        if against:
            raise ValueError(
                f"engine.attention_backend is group: {'; '.join(against)}: set it to auto, which takes FlashAttention"
            )
        return GROUP
    if (kind := model.get("model_type")) not in MEASURED_MODELS:
        against.append(f"no engine of {kind} was measured with it")
    if config.engine.tensor_parallel_size != 1:
        against.append(f"no engine of {config.engine.tensor_parallel_size} GPUs was measured with it")
    if not against:
        logger.info("engine.attention_backend: auto reads a group's common prompt once")
        return GROUP
    logger.info("engine.attention_backend: auto is FLASH_ATTN, and not group: %s", "; ".join(against))
    return "FLASH_ATTN"


def _against_groups(
    config: ServiceConfig, model: AttentionSettings, head_size: int | None, capability: tuple[int, int] | None
) -> Iterator[str]:
    engine, extra = config.engine, config.engine.extra
    overrides = extra.get("hf_overrides")
    given = {**model, **(overrides if isinstance(overrides, dict) else {})}
    if capability is not None and capability[0] != FLASH_ATTENTION_3:
        yield f"it needs FlashAttention 3, and the GPU's compute capability is {capability[0]}.{capability[1]}, not 9.0"
    if head_size not in HEAD_SIZES:
        yield f"the model's heads have {head_size} numbers, and it was measured with {_listed(HEAD_SIZES)}"
    if (ratio := _queries_per_kv_head(model, engine.tensor_parallel_size)) not in QUERIES_PER_KV_HEAD:
        found = "an unknown number of" if ratio is None else f"{ratio:g}"
        measured = _listed(QUERIES_PER_KV_HEAD)
        yield f"the model has {found} query heads for each KV head, and it was measured with {measured}"
    if given.get("sliding_window") and given.get("use_sliding_window", True):
        yield "the model has a sliding window"
    whole = {"full_attention"} | (set() if given.get("use_sliding_window", True) else {"sliding_attention"})
    if others := sorted({*(model.get("layer_types") or ())} - whole):
        yield f"the model has layers of {', '.join(others)}"
    if model.get("attn_logit_softcapping"):
        yield "the model caps its attention's logits"
    if is_batch_invariant(config):
        yield "results depend on who shares the batch, and engine.env asks for batch invariance"
    if extra.get("speculative_config") is not None:
        yield "it decodes one token of a sequence a step, and engine.extra.speculative_config asks for more"
    if extra.get("decode_context_parallel_size", 1) != 1:
        yield "it reads whole sequences, and engine.extra.decode_context_parallel_size cuts them"


def _queries_per_kv_head(model: AttentionSettings, ranks: int) -> float | None:
    """On each rank, which has at least one KV head."""
    heads = model.get("num_attention_heads")
    if not heads:
        return None
    kv_heads = model.get("num_key_value_heads") or heads
    return heads / ranks / max(1, kv_heads / ranks)


def _listed(numbers: tuple[int, ...]) -> str:
    return " and ".join(map(str, numbers))
