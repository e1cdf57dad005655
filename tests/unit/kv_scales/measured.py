"""What replicas measure of a model of one attention layer, and what an ingest makes of it: small versions on disk."""

from pathlib import Path

from rollout_service.config import ServiceConfig
from rollout_service.kv_scales.coordinator import VersionScales
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.kv_scales import KVMeasurement, KVScaleResult, LayerError
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest
from tests.unit.store.versions import stage

LAYER = "model.layers.0.self_attn"
NO_ERROR = LayerError(
    k_saturated=0,
    v_saturated=0,
    k_relative=0,
    v_relative=0,
    k_channel_relative=0,
    v_channel_relative=0,
    logit_rms=0,
)


def measured(*passes: tuple[float, float, float], tokens: int = 64, **errors: float) -> KVMeasurement:
    """By one rank: the largest |q|, |k|, |v| of each pass, and errors that are 0 unless given."""
    error = NO_ERROR.model_copy(update=errors)
    return KVMeasurement(amax={LAYER: passes}, errors={LAYER: error}, tokens=tokens)


def scales_of(q: float, k: float, v: float) -> dict[str, float]:
    """By their names in a checkpoint."""
    return {f"{LAYER}.{x}_scale": float(scale) for x, scale in zip("qkv", (q, k, v), strict=True)}


class Calibrating:
    """The scales of an ingest's versions."""

    def __init__(self, root: Path, model: Path) -> None:
        """``root``: a log, which may go on from before. Raises LogCorrupt."""
        config = ServiceConfig.model_validate({"model": {"path": model}, "kv_cache": {"scales_policy": "calibrate"}})
        self.log = WeightLog(root)
        self.scales = VersionScales(config, ServedModel.load(model), self.log)
        if (head := self.log.head()) is not None:
            self.scales.restore(self.log.manifest(head.version))

    def commit(self, version: int, scales: dict[str, float] | None = None) -> Manifest:
        """A version that came with ``scales``, or without."""
        manifest = self.scales.with_scales(stage(self.log, version), scales)
        self.log.commit(manifest, "keep")
        self.scales.committed(manifest)
        return manifest

    def publish(self, version: int, *ranks: KVMeasurement, replica_id: str = "a") -> KVScaleResult:
        """What becomes of a measurement."""
        return self.scales.publish(version, replica_id, ranks)

    def measure(self, version: int, *ranks: KVMeasurement) -> KVScaleResult:
        """Commit a version that comes without scales, and measure it."""
        assert self.commit(version).awaits_kv_scales
        return self.publish(version, *ranks)
