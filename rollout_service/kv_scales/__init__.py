"""Scales of an FP8 KV cache, measured where the trainer computes q, k and v.

This much needs neither torch nor transformers: the scales and their arithmetic, for trainers of any kind.
``observer`` measures in a transformers model, ``fp8_error`` says what FP8 would cost.
"""

from rollout_service.kv_scales.scales import (
    FP8_MAX,
    KVScales,
    LayerScales,
    Provenance,
    ScaledFrom,
    scales_from_amax,
)

__all__ = ["FP8_MAX", "KVScales", "LayerScales", "Provenance", "ScaledFrom", "scales_from_amax"]
