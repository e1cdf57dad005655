# mypy: implicit-reexport
# ruff: noqa: F401 - names for other modules
"""Undocumented names of vLLM's FlashAttention backend, from whose classes ``engine/attention/`` inherits.

vLLM documents the registration of a backend by a plug-in, but not the parts of a backend. Importing this file loads
FlashAttention's libraries if there is a GPU: only ``engine/attention/backend.py`` does so, in workers of engines with
that backend.
"""

import importlib
from types import ModuleType
from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache


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
