"""Scales of an FP8 KV cache, loaded into a live engine apart from the weights.

vLLM keeps each scale several times: a tensor on the device, a Python float, for k and v a tensor on the host too. Which
kernel reads which differs, so they are only ever changed by vLLM's own loader, of the attention layers alone, and read
back afterwards. They therefore follow a version however its weights were loaded.
"""

from collections.abc import Mapping
from typing import Any

import torch

from rollout_service.kv_scales.scales import TENSORS
from rollout_service.vllm_internals import (
    Attention,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    is_quantized_kv_cache,
    kv_scale,
    kv_scale_copies,
)

_ATTENTION = ".attn"
"""vLLM's module inside the one that a checkpoint's names end at: ``model.layers.0.self_attn`` has ``.attn``."""


def load_kv_scales(model: torch.nn.Module, model_config: Any, scales: Mapping[str, float] | None) -> int:
    """Give every layer with an FP8 cache its q, k and v scales; returns how many scales were loaded.

    Layers that have them already are left alone. Call it with nothing cached: codes of other scales mean other values.

    Args:
        scales: by ``model.layers.N.self_attn.{q,k,v}_scale``. None: 1 for all.

    Raises RuntimeError if a name is of no layer, a layer gets none, or vLLM holds something else afterwards.
    """
    layers = layers_by_name(model)
    if not layers:  # a BF16 cache
        return 0
    named = {f"{name}.{x}_scale": 1.0 for name in layers for x in TENSORS} if scales is None else dict(scales)
    wanted = {name: torch.tensor(value, dtype=torch.float32) for name, value in named.items()}
    _require_same_names(set(wanted), {f"{name}.{x}_scale" for name in layers for x in TENSORS})
    changed = {name: layer for name, layer in layers.items() if not _has(name, layer, wanted)}
    for name, layer in changed.items():
        _load(name, layer, model_config, wanted)
    if wrong := [line for name, layer in changed.items() for line in _differing(name, layer, wanted)]:
        raise RuntimeError(f"vLLM holds other KV scales than were loaded: {', '.join(wrong[:5])}")
    return len(TENSORS) * len(changed)


def layers_by_name(model: torch.nn.Module) -> dict[str, Attention]:
    """vLLM's attention layers with an FP8 cache, by their names in a checkpoint: ``model.layers.0.self_attn``."""
    return {
        name.removesuffix(_ATTENTION): module
        for name, module in model.named_modules()
        if isinstance(module, Attention) and is_quantized_kv_cache(module.kv_cache_dtype)
    }


def held_scales(layer: torch.nn.Module) -> dict[str, list[float]]:
    """``q``, ``k``, ``v`` → every copy of the scale that vLLM has in an attention layer."""
    return {x: kv_scale_copies(layer, x) for x in TENSORS}


def _load(name: str, layer: torch.nn.Module, model_config: Any, wanted: Mapping[str, torch.Tensor]) -> None:
    """As a reload of the whole model does it with a checkpoint's scales, looking for nothing else to reload."""
    initialize_layerwise_reload(layer)
    for x in TENSORS:
        parameter = getattr(layer, f"{x}_scale", None)
        if parameter is None:  # its quantization configuration gives attention no method
            raise RuntimeError(f"{name}: this engine cannot load KV scales, and the version has some")
        parameter.weight_loader(parameter, wanted[f"{name}.{x}_scale"])
    finalize_layerwise_reload(layer, model_config)


def _has(name: str, layer: torch.nn.Module, wanted: Mapping[str, torch.Tensor]) -> bool:
    """By the Python floats, for which no device is waited for."""
    return all(kv_scale(layer, x) == wanted[f"{name}.{x}_scale"].item() for x in TENSORS)


def _differing(name: str, layer: torch.nn.Module, wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """What is not as wanted, in words."""
    return [
        f"{name}.{x}_scale is {copies}, not {wanted[f'{name}.{x}_scale'].item()}"
        for x, copies in held_scales(layer).items()
        if any(copy != wanted[f"{name}.{x}_scale"].item() for copy in copies)
    ]


def _require_same_names(found: set[str], expected: set[str]) -> None:
    missing, unknown = sorted(expected - found), sorted(found - expected)
    if missing or unknown:
        raise RuntimeError(
            f"the version has {len(found)} KV scales, not the {len(expected)} of this engine's layers: missing "
            f"{missing[:3]}, unknown {unknown[:3]}"
        )
