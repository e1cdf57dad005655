"""Scales of an FP8 KV cache, measured where the trainer computes q, k and v.

This module has the scales and their arithmetic, for any trainer. It needs neither torch nor transformers. ``observer``
measures in a transformers model, ``fp8_error`` computes the error of FP8.
"""

from rollout_service.kv_scales.scales import (
    FP8_MAX,
    KVScales,
    LayerScales,
    scales_from_amax,
)

__all__ = ["FP8_MAX", "KVScales", "LayerScales", "scales_from_amax"]
