"""What replicas measure of a model of one attention layer, and what an ingest makes of it: small versions on disk."""

from pathlib import Path
from typing import Any

from rollout_service.config import ServiceConfig
from rollout_service.kv_scales.coordinator import VersionScales
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.kv_scales import CalibrationLease, KVMeasurement, KVScaleResult, LayerError
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
    """What the ingest has of calibration. Scales are the largest values / 448 unless the configuration says more."""

    def __init__(self, root: Path, model: Path, **calibration: Any) -> None:
        """``root``: a log, which may go on from before. Raises LogCorrupt."""
        exact = {"margin": 1.0, "power_of_two": False, **calibration}
        kv_cache = {"scales_policy": "calibrate", "calibration": exact}
        config = ServiceConfig.model_validate({"model": {"path": model}, "kv_cache": kv_cache})
        self.log = WeightLog(root)
        self.loading: set[tuple[str, int]] = set()
        """Which replica is on its way to which version."""
        model_shape = ServedModel.load(model)
        self.now = 0.0
        """By its clock, in seconds."""
        self.scales = VersionScales(
            config, model_shape, self.log, lambda *replica: replica in self.loading, lambda: self.now
        )
        if (head := self.log.head()) is not None:
            self.scales.restore(self.log.manifest(head.version))

    def commit(self, version: int, scales: dict[str, float] | None = None) -> Manifest:
        """A version that came with ``scales``, or without."""
        manifest = self.scales.added_to(stage(self.log, version), scales)
        self.log.commit(manifest, "keep")
        self.scales.committed(manifest)
        return manifest

    def lease(self, replica_id: str, version: int) -> CalibrationLease | KVScaleResult | None:
        """What a replica that is on its way to a version is told."""
        self.loading.add((replica_id, version))
        return self.scales.lease(version, replica_id)

    def publish(self, version: int, *ranks: KVMeasurement, replica_id: str = "a") -> KVScaleResult:
        """What becomes of a measurement."""
        return self.scales.publish(version, replica_id, ranks)

    def measure(self, version: int, *ranks: KVMeasurement) -> KVScaleResult:
        """Commit a version that comes without scales, and measure it."""
        assert self.commit(version).awaits_kv_scales
        return self.publish(version, *ranks)
