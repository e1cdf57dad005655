"""What one rank of an engine saw of q, k and v, and what FP8 costs them."""

from collections.abc import Mapping, Sequence

import numpy as np

from rollout_service.kv_scales.fp8_error import LayerError
from rollout_service.kv_scales.scales import FP8_MAX, TENSORS
from rollout_service.protocol.base import Frozen


class KVMeasurement(Frozen):
    """Of some tokens, by one rank. Layers are named as in a checkpoint: ``model.layers.0.self_attn``."""

    amax: dict[str, tuple[tuple[float, float, float], ...]]
    """Layer → for each forward pass the largest |q|, |k| and |v| of this rank's heads."""
    errors: dict[str, LayerError]
    """Layer → what FP8 costs k and v with the scales that they were measured against."""
    tokens: int
    """Positions; padding is none."""


def saturates_nothing(ranks: Sequence[KVMeasurement], scales: Mapping[str, float] | None) -> bool:
    """Whether all k and v that were seen are within 448 · scale; ``scales`` by ``<layer>.{k,v}_scale``, None: 1."""
    return all(
        amax[TENSORS.index(x)] <= FP8_MAX * (1.0 if scales is None else scales[f"{layer}.{x}_scale"])
        for rank in ranks
        for layer, passes in rank.amax.items()
        for amax in passes
        for x in ("k", "v")
    )


def worst_errors(ranks: Sequence[KVMeasurement]) -> dict[str, LayerError]:
    """Layer → each error of the rank where it is largest; NaN if it is NaN for any."""
    return {layer: _worst([rank.errors[layer] for rank in ranks]) for layer in ranks[0].errors}


def _worst(errors: Sequence[LayerError]) -> LayerError:
    found = {name: float(np.max([getattr(error, name) for error in errors])) for name in LayerError.model_fields}
    return LayerError(**found)
