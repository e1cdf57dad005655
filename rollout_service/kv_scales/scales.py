"""Scales of q, k and v per attention layer, and their computation from largest absolute values. Needs no torch."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rollout_service.errors import InvalidRequest
from rollout_service.protocol.base import Frozen

FP8_MAX = 448.0
"""The largest finite E4M3 value (OCP 8-bit floating point specification)."""
MARGIN = 1.05
"""Factor on the largest value, as a margin for tokens that the calibration did not see."""
TENSORS = ("q", "k", "v")
"""Order of the last axis of every array of largest absolute values."""

Amax = npt.NDArray[np.floating]


class LayerScales(Frozen):
    """Scales of one layer: an engine stores ``x / scale`` in FP8 and computes with ``code · scale``."""

    q: float = Field(gt=0, allow_inf_nan=False)
    k: float = Field(gt=0, allow_inf_nan=False)
    v: float = Field(gt=0, allow_inf_nan=False)


class KVScales(Frozen):
    """Scales of every attention layer of a model."""

    layers: dict[str, LayerScales] = Field(min_length=1)
    """Scales by the attention module's name in Hugging Face's scheme: ``model.layers.0.self_attn``."""

    def named(self) -> dict[str, float]:
        """Return name → scale as a checkpoint stores them (vLLM loads these names): ``<layer>.q_scale``, ``k``, ``v``.

        Always contains all three of a layer: vLLM uses 1 for a missing one.
        """
        return {f"{name}.{x}_scale": getattr(scales, x) for name, scales in self.layers.items() for x in TENSORS}

    def require_layers(self, expected: Sequence[str]) -> None:
        """Raise InvalidRequest unless there are scales for exactly these layers."""
        missing = [name for name in expected if name not in self.layers]
        unknown = [name for name in self.layers if name not in set(expected)]
        if missing or unknown:
            raise InvalidRequest(
                f"KV scales of {len(self.layers)} layers do not fit a model of {len(expected)}: missing {missing[:5]}, "
                f"unknown {unknown[:5]}. Calibrate with the model that is served",
                {"missing": missing, "unknown": unknown},
            )


def scales_from_amax(ranks: Sequence[Mapping[str, npt.ArrayLike]]) -> KVScales:
    """Compute scales from the largest absolute values that each rank saw.

        scale = max over ranks and micro-batches (amax) · 1.05 / 448, rounded up to a power of two

    In a floating-point format, the rounding only costs a bit of range at the lower end. Values that a scale of 1
    neither saturates nor loses then have the same codes as with 1. A scale also stays the same from version to version
    until the largest value doubles or halves.

    Any trainer can call it: with Megatron, each rank passes the inputs of its core attention.

    Args:
        ranks: per rank, layer → [num_micro_batches, 3], the largest |q|, |k| and |v| of each micro-batch. Ranks may
            hold different layers (pipeline parallelism) or heads (tensor parallelism), and any number of micro-batches.

    Raises InvalidRequest, with the layers' names, for zero, infinity or NaN, and if nothing was observed.
    """
    layers = {}
    for layer, amax in largest_of_ranks(ranks).items():
        q, k, v = (next_power_of_two(float(x) * MARGIN / FP8_MAX) for x in amax)
        layers[layer] = LayerScales(q=q, k=k, v=v)
    return KVScales(layers=layers)


def largest_of_ranks(ranks: Sequence[Mapping[str, npt.ArrayLike]]) -> dict[str, Amax]:
    """Return the largest |q|, |k| and |v| of each layer, [3], over ranks and micro-batches.

    ``ranks`` as in ``scales_from_amax``, which raises the same.
    """
    largest: dict[str, Amax] = {}
    for rank in ranks:
        for layer, observed in rank.items():
            here = _require_valid(layer, observed).max(axis=0)
            largest[layer] = np.maximum(largest.get(layer, here), here)
    if not largest:
        raise InvalidRequest("no q, k or v was observed: run at least one forward pass on at least one unmasked token")
    _require_usable(largest)
    return {layer: largest[layer] for layer in sorted(largest, key=_in_depth)}


def next_power_of_two(scale: float) -> float:
    """Return the smallest power of two that is not below a positive, finite number."""
    mantissa, exponent = math.frexp(scale)  # scale = mantissa · 2^exponent, 0.5 ≤ mantissa < 1
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def _require_valid(layer: str, observed: npt.ArrayLike) -> Amax:
    amax = np.asarray(observed, np.float64)
    if amax.ndim != 2 or amax.shape[1] != len(TENSORS) or not len(amax):
        raise InvalidRequest(
            f"{layer}: amax has shape {list(amax.shape)}, wanted [num_micro_batches ≥ 1, 3] of q, k, v"
        )
    if not np.isfinite(amax).all():
        passes = int((~np.isfinite(amax)).any(1).sum())
        raise InvalidRequest(f"{layer}: q, k or v has NaN or infinity in {passes} of {len(amax)} micro-batches")
    return amax


def _require_usable(largest: Mapping[str, Amax]) -> None:
    dead = [f"{layer}.{TENSORS[i]}" for layer, amax in largest.items() for i in np.flatnonzero(amax <= 0)]
    if dead:
        raise InvalidRequest(
            f"{len(dead)} tensors were zero throughout, which gives no scale: {dead[:5]}. Was the model loaded?",
            {"tensors": dead},
        )


def _in_depth(layer: str) -> tuple[tuple[float, str], ...]:
    """Sort key that puts layer 2 before layer 10."""
    return tuple((float(part), "") if part.isdecimal() else (math.inf, part) for part in layer.split("."))
