"""The error of an FP8 KV cache with one scale per tensor, for each layer, and limits for it."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rollout_service.kv_scales.scales import FP8_MAX, LayerScales
from rollout_service.protocol.kv_scales import KVMeasurement, LayerError

_SATURATED, _RELATIVE, _CHANNEL_RELATIVE = 1e-3, 0.1, 0.25
LIMITS = {
    "k_saturated": _SATURATED,
    "v_saturated": _SATURATED,
    "k_relative": _RELATIVE,  # rounding alone makes 0.026
    "v_relative": _RELATIVE,
    "k_channel_relative": _CHANNEL_RELATIVE,
    "v_channel_relative": _CHANNEL_RELATIVE,
    "logit_rms": 0.5,  # multiplies the odds of two positions by 1.6
}
"""Limit for each field of ``LayerError``. A layer that exceeds any of them is unfit: FP8 is not accurate enough for its
k and v."""


def fp8_round_trip(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x after a round trip through an E4M3 cache: x / scale, clamped to ±448, rounded, times scale. fp32, x's
    shape."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def masked_amax(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the largest |x| of x [batch, heads, tokens, head_dim] where ``counts`` [batch, tokens] bool; a scalar,
    fp32."""
    of_position = torch.linalg.vector_norm(x.float(), math.inf, dim=(1, 3))
    return torch.where(counts, of_position, 0).amax()


def unfit_layers(errors: Mapping[str, LayerError]) -> dict[str, str]:
    """Return layer → reasons why FP8 is not accurate enough for its k and v; empty if it is for all layers."""
    unfit = {}
    for layer, error in errors.items():
        values = {measured: getattr(error, measured) for measured in LIMITS}
        # NaN is above every limit
        wrong = [measured for measured, value in values.items() if not value <= LIMITS[measured]]
        if wrong:
            unfit[layer] = "; ".join(f"{each} {values[each]:.3g} is above {LIMITS[each]:g}" for each in wrong)
    return unfit


def why_unfit(unfit: Mapping[str, str], num_layers: int) -> str:
    """Format ``unfit_layers`` as a sentence, with the first five names."""
    first = "; ".join(f"{layer}: {why}" for layer, why in list(unfit.items())[:5])
    more = f", and {len(unfit) - 5} more" if len(unfit) > 5 else ""
    return f"FP8 is not accurate enough for the keys and values of {len(unfit)} of {num_layers} layers: {first}{more}"


def worst_errors(ranks: Sequence[KVMeasurement]) -> dict[str, LayerError]:
    """Return layer → the maximum over ranks of each error; NaN if it is NaN for any rank."""
    return {
        layer: LayerError(
            **{
                name: float(np.max([getattr(rank.errors[layer], name) for rank in ranks]))
                for name in LayerError.model_fields
            }
        )
        for layer in ranks[0].errors
    }


class ErrorSums:
    """Sums over the forward passes of one layer, on its device."""

    def __init__(self, scales: LayerScales) -> None:
        self._scales = scales
        self._k, self._v = _TensorSums(scales.k), _TensorSums(scales.v)
        self._logit: torch.Tensor | float = 0.0
        self._pairs: torch.Tensor | float = 0.0

    def add(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        counts_q: torch.Tensor,
        counts_k: torch.Tensor,
        scaling: float,
    ) -> None:
        """Add a pass: q [batch, num_heads, tokens, head_dim], k and v [batch, num_kv_heads, tokens, head_dim].

        ``counts_q`` and ``counts_k``: [batch, tokens] bool, the unmasked positions.
        """
        error = self._k.add(k, counts_k)
        self._v.add(v, counts_k)
        squares, pairs = _logit_error(torch.where(counts_q[:, None, :, None], q.float(), 0), error, counts_q, counts_k)
        self._logit = self._logit + squares * scaling**2
        self._pairs = self._pairs + pairs

    def result(self) -> LayerError:
        """Return the errors so far."""
        return LayerError(
            k_saturated=self._k.saturated(),
            v_saturated=self._v.saturated(),
            k_relative=self._k.relative(),
            v_relative=self._v.relative(),
            k_channel_relative=self._k.channel_relative(),
            v_channel_relative=self._v.channel_relative(),
            logit_rms=float(self._logit / max(self._pairs, 1)) ** 0.5,
        )


class _TensorSums:
    """Squares of x and of its error per channel [num_kv_heads, head_dim], float64, and the number of saturated
    elements."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._squares: torch.Tensor | float = 0.0
        self._error_squares: torch.Tensor | float = 0.0
        self._saturated: torch.Tensor | float = 0.0
        self._elements: torch.Tensor | float = 0.0

    def add(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Add x. Return the error of x [batch, num_kv_heads, tokens, head_dim], zero at masked positions."""
        x = torch.where(counts[:, None, :, None], x.float(), 0)
        error = fp8_round_trip(x, self._scale) - x
        self._squares = self._squares + x.double().square().sum((0, 2))
        self._error_squares = self._error_squares + error.double().square().sum((0, 2))
        self._saturated = self._saturated + (x.abs() / self._scale > FP8_MAX).sum()
        self._elements = self._elements + counts.sum() * x.shape[1] * x.shape[3]
        return error

    def saturated(self) -> float:
        return float(self._saturated / max(self._elements, 1))

    def relative(self) -> float:
        squares, errors = torch.as_tensor(self._squares), torch.as_tensor(self._error_squares)
        return float((errors.sum() / squares.sum()).sqrt())

    def channel_relative(self) -> float:
        """Return the mean relative error of channels. The error of an all-zero channel is 0."""
        squares, errors = torch.as_tensor(self._squares), torch.as_tensor(self._error_squares)
        return float(torch.where(squares > 0, errors / squares, 0).sqrt().mean())


def _logit_error(
    q: torch.Tensor, error: torch.Tensor, counts_q: torch.Tensor, counts_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of (q·(Δk − mean Δk))² over all heads and pairs of positions of each row, and the number of terms.

    Σ_ts (q_t·e_s)² = ⟨Σ_t q_t q_tᵀ, Σ_s e_s e_sᵀ⟩, so no matrix of pairs is computed.
    """
    keys = counts_k.sum(1).clamp(min=1)[:, None, None, None]
    centred = (error - error.sum(2, keepdim=True) / keys) * counts_k[:, None, :, None]
    batch, heads, tokens, dim = q.shape
    grouped = q.reshape(batch, error.shape[1], -1, tokens, dim)
    of_queries = torch.einsum("bgrti,bgrtj->bgij", grouped, grouped)
    of_errors = torch.einsum("bgti,bgtj->bgij", centred, centred)
    # a sum of squares, which rounding may have made negative
    return (of_queries * of_errors).sum().clamp(min=0), (counts_q.sum(1) * counts_k.sum(1)).sum() * heads
