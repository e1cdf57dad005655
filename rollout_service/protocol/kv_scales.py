"""What workers, replicas and the ingest tell each other of the scales of an FP8 KV cache (docs/kv_scales.md).

Layers are named as in a checkpoint, ``model.layers.0.self_attn``, and scales by ``<layer>.{q,k,v}_scale``.
"""

from pydantic import Field

from rollout_service.protocol.base import Frozen


class LayerError(Frozen):
    """The cost of FP8 k and v in one layer. Of k: ``k``; of v: ``v``."""

    k_saturated: float
    """Share of elements with |x| / scale above 448, which are clamped."""
    v_saturated: float
    k_relative: float
    """‖x̂ − x‖ / ‖x‖, Frobenius; rounding alone makes about 0.026."""
    v_relative: float
    k_channel_relative: float
    """Mean over channels (head, dimension) of the relative error of each: near 1 where most channels are lost beside
    a few huge ones, which the Frobenius norm does not show."""
    v_channel_relative: float
    logit_rms: float
    """Root mean square, over pairs of positions of a sequence, of the error of q·k·scaling, in nats; what all keys
    share for a query does not count, since the softmax does not see it."""


class KVMeasurement(Frozen):
    """What one rank of an engine saw of q, k and v."""

    amax: dict[str, tuple[tuple[float, float, float], ...]]
    """Layer → for each forward pass the largest |q|, |k| and |v| of this rank's heads."""
    errors: dict[str, LayerError]
    """Layer → what FP8 costs k and v with the scales that they were measured against."""
    tokens: int
    """Positions; padding is none."""


class CalibrationLease(Frozen):
    """One replica is to measure the KV scales of a version before it serves it, while the others wait for them."""

    version: int
    replica_id: str
    """Who holds it, until it publishes, ends, or goes on to another version."""
    scales: dict[str, float] | None
    """To load the version with until then: those of the version before; None: 1 everywhere."""


class KVScaleResult(Frozen):
    """The scales of a version that came without any and was measured; immutable once it is published."""

    version: int
    scales: dict[str, float] | None
    """None: 1 everywhere."""
    replica_id: str
    """Who measured."""
    tokens: int = Field(ge=0)
    """Positions that were measured."""
    largest: dict[str, tuple[float, float, float]] = Field(default_factory=dict)
    """Layer → the largest |q|, |k| and |v| that the scales are made from, which ``progressive`` goes on from."""
    error: str | None = None
    """Why the measurement gave no scales, and the version has those of the one before; None: it gave them."""
