"""Who measures the KV scales of a version that came without any, and what is made of the measurement."""

from collections.abc import Callable, Sequence

from rollout_service.config.engine import KVCalibrationConfig
from rollout_service.errors import InvalidRequest, NotFound
from rollout_service.kv_scales.measurement import KVMeasurement
from rollout_service.kv_scales.policy import KVScalesRule
from rollout_service.kv_scales.result import KVScaleResult, read_result, write_result
from rollout_service.kv_scales.scales import ScaledFrom, largest_of_ranks, layer_scales, named_scales
from rollout_service.protocol.base import Frozen
from rollout_service.store.log import WeightLog

Largest = dict[str, tuple[float, float, float]]


class CalibrationLease(Frozen):
    """What a replica does about the scales of a version that it is about to load."""

    scales: dict[str, float] | None
    """To load it with; None: 1 everywhere."""
    measures: bool
    """Whether it is to measure better ones before it serves the version."""


class KVCalibration:
    """Gives each version that is to be measured to one replica, and settles its scales once."""

    def __init__(
        self, config: KVCalibrationConfig, log: WeightLog, rule: KVScalesRule, loads: Callable[[str, int], bool]
    ) -> None:
        """``loads``: whether a replica is live and on its way to a version."""
        self._config, self._log, self._rule, self._loads = config, log, rule, loads
        self._measuring: dict[int, str] = {}
        self._newest: KVScaleResult | None = None

    def remember(self, version: int) -> None:
        """Take up what is in the log of the newest version, and what was settled last. Raises LogCorrupt."""
        if (last := read_result(self._log.root)) is not None:
            self._rule.measured_before(last)
        settled = self._newest = self.settled(version)
        if settled is not None:
            self._rule.settled(settled)

    def settled(self, version: int) -> KVScaleResult | None:
        """What was measured of a version, if it was. Raises LogCorrupt."""
        if self._newest is not None and self._newest.version == version:
            return self._newest
        return read_result(self._log.folder(version))

    def turn(self, version: int, replica_id: str) -> CalibrationLease | None:
        """Scales to load, the order to measure them, or None: another replica measures them right now.

        That one may die or fail: whoever asks next is then given the turn. Raises LogCorrupt.
        """
        if (settled := self.settled(version)) is not None:
            return CalibrationLease(scales=settled.scales, measures=False)
        other = self._measuring.get(version)
        if other not in (None, replica_id) and self._loads(other, version):
            return None
        self._measuring[version] = replica_id
        return CalibrationLease(scales=self._rule.newest, measures=True)

    def settle(self, version: int, replica_id: str, ranks: Sequence[KVMeasurement]) -> KVScaleResult:
        """Make and keep the scales of a version. Measured twice, the first holds. Raises NotFound, OSError, LogCorrupt.

        ``ranks``: what each rank saw.
        """
        if (known := self.settled(version)) is not None:
            return known
        folder = self._log.folder(version)
        if not folder.is_dir():
            raise NotFound(f"version {version} is not in the log any more: look for a newer one")
        settled = self._judged(version, replica_id, ranks)
        write_result(folder, settled)
        self._newest = settled
        self._measuring.pop(version, None)
        self._rule.settled(settled)
        write_result(self._log.root, settled)  # its version may be dropped before the next one is measured
        return settled

    def _judged(self, version: int, replica_id: str, ranks: Sequence[KVMeasurement]) -> KVScaleResult:
        before = KVScaleResult(
            version=version,
            scales=self._rule.newest,
            replica_id=replica_id,
            tokens=ranks[0].tokens,
            largest=self._rule.largest,
        )
        try:
            largest = self._combined([rank.amax for rank in ranks])
            scales = named_scales(layer_scales(largest, self._how()))
            self._rule.check(scales)
        except InvalidRequest as error:
            return before.model_copy(update={"error": error.message})
        return before.model_copy(update={"scales": scales, "largest": largest})

    def _how(self) -> ScaledFrom:
        c = self._config
        return ScaledFrom(percentile=c.percentile, margin=c.margin, power_of_two=c.power_of_two)

    def _combined(self, ranks: Sequence[dict[str, tuple[tuple[float, float, float], ...]]]) -> Largest:
        """The largest values, with ``progressive`` those of versions before among them. Raises InvalidRequest."""
        before = self._rule.largest if self._config.progressive else {}
        found: Largest = {}
        for layer, amax in largest_of_ranks(ranks, self._config.percentile).items():
            q, k, v = map(max, amax.tolist(), before.get(layer, (0.0, 0.0, 0.0)))
            found[layer] = (q, k, v)
        return found
