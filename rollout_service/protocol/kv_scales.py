"""Messages about the accuracy of an FP8 KV cache, between workers and replicas (docs/kv_scales.md).

Layers are named as in a checkpoint, ``model.layers.0.self_attn``, and scales by ``<layer>.{q,k,v}_scale``.
"""

from rollout_service.protocol.base import Frozen


class LayerError(Frozen):
    """The error that FP8 causes in k and v of one layer. Fields with ``k`` are about k, those with ``v`` about v."""

    k_saturated: float
    """Share of elements with |x| / scale above 448, which are clamped."""
    v_saturated: float
    k_relative: float
    """‖x̂ − x‖ / ‖x‖, Frobenius; rounding alone makes about 0.026."""
    v_relative: float
    k_channel_relative: float
    """Mean over channels (head, dimension) of each channel's relative error. It is near 1 where most channels are lost
    beside a few huge ones, which the Frobenius norm does not show."""
    v_channel_relative: float
    logit_rms: float
    """Root mean square error of q·k·scaling in nats, over pairs of positions of a sequence. An error that all keys of a
    query share is left out, since the softmax cancels it."""


class KVMeasurement(Frozen):
    """Statistics of q, k and v on one rank of an engine."""

    amax: dict[str, tuple[tuple[float, float, float], ...]]
    """Layer → the largest |q|, |k| and |v| of this rank's heads, for each forward pass."""
    errors: dict[str, LayerError]
    """Layer → error of FP8 k and v with the scales under test."""
    tokens: int
    """Positions, without padding."""
