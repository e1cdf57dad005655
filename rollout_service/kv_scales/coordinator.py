"""The ingest's side of KV scales: the scales of each version, which replica measures them, and the KV cache's dtype.

    <root>/<version>/kv_scales.json    measured scales of a version: JSON and its xxh3-128, beside the manifest
    <root>/kv_scales.json              the last published scales, since their version may be dropped
    <root>/KV_CACHE                    dtype of the cache, FP8 or BF16, once it was measured

The commit of a version decides which scales replicas load, and stores that in the manifest as ``kv_scales_from``:

    trainer      the scales that came with the version
    reuse        the scales of the previous version
    unit         1 everywhere
    calibrate    the measurement of one replica before it serves the version: see ``CalibrationState``
"""

import asyncio
import logging
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from rollout_service.config import ServiceConfig
from rollout_service.config.engine import KVCalibrationConfig
from rollout_service.errors import InsufficientStorage, InvalidManifest, InvalidRequest, LogCorrupt, NotFound, NotReady
from rollout_service.kv_scales.scales import TENSORS, ScaledFrom, largest_of_ranks, layer_scales, named_scales
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.protocol.kv_scales import CalibrationLease, KVMeasurement, KVScaleResult
from rollout_service.runtime.tasks import Changes, ShieldedTasks, Turns
from rollout_service.store.durable_io import DISK_FULL, read_sealed, write_sealed
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest

logger = logging.getLogger(__name__)

KV_SCALES_FILE = "kv_scales.json"
_FIELDS = TypeAdapter(dict[str, Any])
_OF_BEFORE = ("how", "drift", "saturated")
"""Fields of older files, from when scales could be kept although new ones had been measured (``max_drift``). They are
ignored: ``scales`` and ``largest`` had the same meaning, whatever ``how`` was."""
_SMALLEST_NORMAL = 2.0**-126
_LARGEST = (2 - 2**-7) * 2.0**127 / 448
"""Largest valid scale: times the largest FP8 code, it is the largest BF16 number. A larger scale would overflow."""


LEASE_S = 30.0
"""Time in seconds until another replica may also measure a version: the holder's engine may hang while the replica
still reports. If both publish, the first result is kept."""


class _Lease(NamedTuple):
    replica_id: str
    since: float
    """Time of the clock in seconds."""


class CalibrationState(Enum):
    """State of the scales of a version with ``calibrate``.

    AWAITING ── a replica that loads it asks ──► LEASED ── its holder publishes ──► PUBLISHED or FAILED
        ◄── the holder ends, fails, goes on to another version, or has not published for ``LEASE_S`` ──
    """

    AWAITING = "nobody has measured it: the first replica that asks is given the lease"
    LEASED = "its holder loads it with the scales of the version before and measures; the others wait"
    PUBLISHED = "every replica loads what was measured"
    FAILED = "the measurement gave no scales: every replica loads those of the version before"


class VersionScales:
    """The scales of each version. They are stored in the log; leases and the newest scales are in memory."""

    def __init__(
        self,
        config: ServiceConfig,
        model: ServedModel,
        log: WeightLog,
        is_loading: Callable[[str, int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_loading``: returns True if a replica is live and loading a version. ``clock``: in seconds.

        Raises ValueError for the policy ``calibrate`` if no scales can be used.
        """
        self._config, self._model, self._log, self._is_loading = config.kv_cache, model, log, is_loading
        self._no_use = _no_use(config, model)
        # with dtype auto, a model without such layers has a BF16 cache, and nothing is measured
        in_bf16 = self._config.dtype == "auto" and not model.attention
        if self._config.scales_policy == "calibrate" and self._no_use and not in_bf16:
            raise ValueError(f"kv_cache.scales_policy is calibrate, but {self._no_use}")
        self._clock = clock
        self._leases: dict[int, _Lease] = {}
        """Version → the replica that measures it."""
        self._last: KVScaleResult | None = None
        """The last published result since this process started, or that of the version that was the newest then."""
        self._newest_version = -1
        self.newest: dict[str, float] | None = None
        """Scales of the newest version with known scales; None: 1 everywhere."""
        self.largest: dict[str, tuple[float, float, float]] = {}
        """The last measurement: layer → the largest |q|, |k| and |v|."""
        self.drift: float | None = None
        """The largest ratio, minus 1, between a scale of ``newest`` and the same one before; None: there was none."""

    # --- when a version comes

    def check(self, scales: Mapping[str, float] | None) -> None:
        """Raise InvalidManifest, with every name, unless there are scales for q, k and v of exactly the model's layers.

        A scale is a positive, normal fp32 number, and 448 times the scale must be finite in BF16. None, no scales, is
        valid.
        """
        if scales is None:
            return
        if self._no_use:
            raise InvalidManifest(f"the version brings {len(scales)} KV scales, but {self._no_use}")
        expected = {f"{layer}.{x}_scale" for layer in self._model.attention for x in TENSORS}
        wrong = {
            "missing": sorted(expected - scales.keys()),
            "unknown": sorted(scales.keys() - expected),
            "unusable": [f"{name} is {value:g}" for name, value in scales.items() if not _is_scale(value)],
        }
        wrong = {what: names for what, names in wrong.items() if names}
        if wrong:
            summary = "; ".join(f"{len(names)} {what}: {', '.join(names[:4])}" for what, names in wrong.items())
            raise InvalidManifest(
                f"the KV scales do not fit the served model {self._model.name}, where q, k and v of "
                f"{len(self._model.attention)} attention layers have a positive fp32 number each: {summary}",
                wrong,
            )

    def added_to(self, manifest: Manifest, scales: dict[str, float] | None) -> Manifest:
        """Return the manifest with the scales that came with the version, or as ``scales_policy`` defines."""
        policy = self._config.scales_policy
        if scales is not None:
            return manifest.replace(kv_scales=scales, kv_scales_from="trainer")
        if policy == "calibrate" and not self._no_use and not self._fell_back():
            return manifest.replace(kv_scales_from="calibrate")
        if policy != "unit" and self.newest is not None and not self._no_use:
            return manifest.replace(kv_scales=self.newest, kv_scales_from="reuse")
        return manifest

    def committed(self, manifest: Manifest) -> None:
        """Note that a version is now the newest. Raises LogCorrupt."""
        if not manifest.awaits_kv_scales:
            self._take(manifest.version, manifest.kv_scales)
        elif (result := self.published(manifest.version)) is not None:  # a rollback's
            self.largest = result.largest
            self._take(manifest.version, result.scales)

    def restore(self, newest: Manifest) -> None:
        """Load the log's scales when an ingest starts. Raises LogCorrupt."""
        self._log.kv_cache()  # damage is found at the start, not at a later commit
        last = read_result(self._log.root)
        if not newest.awaits_kv_scales:
            self._newest_version, self.newest = newest.version, newest.kv_scales
        else:
            self._last = read_result(self._log.folder(newest.version))
            last = self._last or last  # after a crash between the two writes, the log's own file is older
            if last is not None:
                self._newest_version, self.newest = last.version, last.scales
        self.largest = {} if last is None else last.largest

    def _fell_back(self) -> bool:
        """Return True if ``kv_cache.dtype: auto`` has resolved to BF16, so that nothing is measured."""
        choice = self._log.kv_cache()
        return self._config.dtype == "auto" and choice is not None and choice.dtype == "bfloat16"

    def _take(self, version: int, scales: dict[str, float] | None) -> None:
        """Store scales as the newest, unless those of a newer version are known: an old version may be published
        late."""
        if version >= self._newest_version:
            self._newest_version, before, self.newest = version, self.newest, scales
            self.drift = drift(before, scales)

    # --- what is measured

    def state(self, version: int) -> CalibrationState:
        """Return the state of a version with ``calibrate``. Raises LogCorrupt."""
        if (result := self.published(version)) is not None:
            return CalibrationState.PUBLISHED if result.error is None else CalibrationState.FAILED
        lease = self._leases.get(version)
        if lease is None or self._clock() - lease.since >= LEASE_S:
            return CalibrationState.AWAITING
        return CalibrationState.LEASED if self._is_loading(lease.replica_id, version) else CalibrationState.AWAITING

    def lease(self, version: int, replica_id: str) -> CalibrationLease | KVScaleResult | None:
        """Return the scales of a version or the lease to measure them; None: another replica has it. Raises
        LogCorrupt."""
        match self.state(version):
            case CalibrationState.PUBLISHED | CalibrationState.FAILED:
                return self.published(version)
            case CalibrationState.LEASED if self._leases[version].replica_id != replica_id:
                return None
        self._leases[version] = _Lease(replica_id, self._clock())
        return CalibrationLease(version=version, replica_id=replica_id, scales=self.newest)

    def publish(self, version: int, replica_id: str, ranks: Sequence[KVMeasurement]) -> KVScaleResult:
        """Compute and store the scales of a version. A second measurement is ignored. Raises NotFound, OSError,
        LogCorrupt.

        ``ranks``: the measurement of each rank.
        """
        if (known := self.published(version)) is not None:
            return known
        folder = self._log.folder(version)
        if not folder.is_dir():
            raise NotFound(f"version {version} is not in the log any more: look for a newer one")
        result = self._result(version, replica_id, ranks)
        write_result(folder, result)
        self._last = result
        self._leases.pop(version, None)
        self.largest = result.largest
        self._take(version, result.scales)
        write_result(self._log.root, result)  # the version may be dropped before the next one is measured
        return result

    def published(self, version: int) -> KVScaleResult | None:
        """Return the measured scales of a version; None: not yet. Raises LogCorrupt."""
        last = self._last  # another thread may publish meanwhile
        if last is not None and last.version == version:
            return last
        return read_result(self._log.folder(version))

    def with_published(self, manifest: Manifest) -> Manifest:
        """Return a committed version with the scales that it awaited, if they are published. Raises LogCorrupt."""
        return with_result(manifest, self.published(manifest.version) if manifest.awaits_kv_scales else None)

    def _result(self, version: int, replica_id: str, ranks: Sequence[KVMeasurement]) -> KVScaleResult:
        before = KVScaleResult(
            version=version,
            scales=self.newest,
            replica_id=replica_id,
            tokens=ranks[0].tokens,
            largest=self.largest,
        )
        config = self._config.calibration
        try:
            largest = self._largest([rank.amax for rank in ranks], config)
            how = ScaledFrom(percentile=config.percentile, margin=config.margin, power_of_two=config.power_of_two)
            scales = named_scales(layer_scales(largest, how))
            self.check(scales)
        except InvalidRequest as error:
            return before.model_copy(update={"error": error.message})
        return before.model_copy(update={"scales": scales, "largest": largest})

    def _largest(
        self, ranks: Sequence[dict[str, tuple[tuple[float, float, float], ...]]], config: KVCalibrationConfig
    ) -> dict[str, tuple[float, float, float]]:
        """Return the largest values of each layer, with ``progressive`` also over earlier versions. Raises
        InvalidRequest."""
        before = self.largest if config.progressive else {}
        found: dict[str, tuple[float, float, float]] = {}
        for layer, amax in largest_of_ranks(ranks, config.percentile).items():
            q, k, v = map(max, amax.tolist(), before.get(layer, (0.0, 0.0, 0.0)))
            found[layer] = (q, k, v)
        return found


class KVScaleCoordinator:
    """KV scales in the ingest, for replicas: the lease to measure a version, its scales, and the dtype of the KV
    cache."""

    def __init__(self, config: ServiceConfig, log: WeightLog, scales: VersionScales, changes: Changes) -> None:
        self._log, self._scales, self._changes = log, scales, changes
        self._falls_back = config.kv_cache.dtype == "auto"
        self._poll_s = config.weights.poll_s
        self._publishing, self._choosing = Turns(), Turns()
        # storing scales must finish although the replica disconnects
        self._shielded = ShieldedTasks()

    async def request_lease(
        self, version: int, replica_id: str, digest: str | None = None
    ) -> CalibrationLease | KVScaleResult:
        """Return the published scales of a version that awaits them, or the lease to measure them; waits for its
        holder.

        ``digest``: digest of the replica's manifest; None: not compared. Raises NotReady after ``poll_s`` or for
        another version of that number, NotFound, or LogCorrupt.
        """
        await self._require_same(version, digest)
        answer: CalibrationLease | KVScaleResult | None = None

        def answered() -> bool:
            nonlocal answer
            answer = self._scales.lease(version, replica_id)
            return answer is not None

        await self._changes.wait(answered, self._poll_s)
        if answer is None:
            raise NotReady(f"another replica still measures the KV scales of version {version}")
        return answer

    async def publish_result(
        self, version: int, replica_id: str, ranks: Sequence[KVMeasurement], digest: str | None = None
    ) -> KVScaleResult:
        """Compute scales from a replica's measurement; return the version's scales from now on.

        Raises NotFound, LogCorrupt, or InsufficientStorage if the disk is full: send it again.
        """
        try:
            await self._require_same(version, digest)
        except NotReady as error:  # the measurement can never be used
            raise NotFound(error.message) from error
        result = await self._shielded.run(self._publish(version, replica_id, ranks))
        await self._changes.notify()
        return result

    def kv_cache_choice(self) -> KVCacheChoice | None:
        """Return the recorded choice for the KV cache; None: it was not measured yet. Raises LogCorrupt."""
        return self._log.kv_cache()

    async def choose_kv_cache(self, choice: KVCacheChoice) -> KVCacheChoice:
        """Store a replica's choice durably, unless there is one already; return the choice for all replicas.

        BF16 that was chosen with ``kv_cache.dtype: auto`` is replaced if FP8 is configured explicitly. Raises
        LogCorrupt, or InsufficientStorage if the disk is full: send it again.
        """
        async with self._choosing:
            known = self._log.kv_cache()
            if known is not None and (self._falls_back or known.dtype == "fp8_e4m3"):
                return known
            logger.info("KV cache: %s, since %s", choice.dtype, choice.why)
            try:
                await asyncio.to_thread(self._log.set_kv_cache, choice)
            except OSError as error:
                raise InsufficientStorage(
                    f"the choice of the KV cache's dtype cannot be kept in {self._log.root}: {error}"
                ) from error
            return choice

    async def close(self) -> None:
        """Finish running writes, and refuse new ones."""
        await self._publishing.close()
        await self._choosing.close()

    async def _require_same(self, version: int, digest: str | None) -> None:
        """Raise NotReady for another version of that number, from before the log was restored from a backup."""
        if digest is None:
            return
        head = self._log.head()
        if head is not None and head.version == version:
            known = head.digest
        else:
            known = (await asyncio.to_thread(self._log.manifest, version)).digest
        if known != digest:
            raise NotReady(f"version {version} is {known} in the ingest's log, and not {digest}: look again")

    async def _publish(self, version: int, replica_id: str, ranks: Sequence[KVMeasurement]) -> KVScaleResult:
        async with self._publishing:
            try:
                result = await asyncio.to_thread(self._scales.publish, version, replica_id, ranks)
            except OSError as error:  # any error: the replica waits and tries again
                instead = "make room there" if error.errno in DISK_FULL else "it is tried again until the disk takes it"
                raise InsufficientStorage(
                    f"the KV scales of version {version} cannot be kept in {self._log.root}: {error}: {instead}"
                ) from error
        if result.error is not None:
            logger.error("version %d keeps the KV scales of before: %s", version, result.error)
        else:
            logger.info("version %d: KV scales measured on %d tokens", version, result.tokens)
        return result


def write_result(folder: Path, result: KVScaleResult) -> None:
    """Write the result beside the manifest, durably and atomically. Raises OSError."""
    write_sealed(folder / KV_SCALES_FILE, result.model_dump_json())


def read_result(folder: Path) -> KVScaleResult | None:
    """Read the result beside the manifest in ``folder``; None if there is none. Raises LogCorrupt for a damaged
    file."""
    text = read_sealed(folder / KV_SCALES_FILE)
    if text is None:
        return None
    try:
        fields = _FIELDS.validate_json(text)
        return KVScaleResult.model_validate({name: value for name, value in fields.items() if name not in _OF_BEFORE})
    except ValidationError as error:
        raise LogCorrupt(f"{folder / KV_SCALES_FILE} does not parse: {error}") from error


def restore_result(result: KVScaleResult | None, staged: Path, version: int) -> None:
    """Copy an older version's measured scales, if any, to a staged version that restores it. Raises OSError.

    The scales stay beside the manifest, so that both versions have the same digest.
    """
    if result is not None:
        write_result(staged, result.model_copy(update={"version": version}))


def with_result(manifest: Manifest, result: KVScaleResult | None) -> Manifest:
    """Return a committed version with the measured scales that it awaited. ``result``: None: not measured yet."""
    if result is None or not manifest.awaits_kv_scales:
        return manifest
    came_from = "unit" if result.scales is None else "calibrate"
    return manifest.replace(kv_scales=result.scales, kv_scales_from=came_from)


def drift(before: Mapping[str, float] | None, now: Mapping[str, float] | None) -> float | None:
    """Return the largest ratio, minus 1, between a scale and the one of the same name before; None: there was none."""
    if before is None or now is None:
        return None
    return max((max(now[name] / before[name], before[name] / now[name]) - 1 for name in now), default=None)


def _no_use(config: ServiceConfig, model: ServedModel) -> str | None:
    """Return the reason why this service cannot use KV scales; None: it can."""
    if config.kv_cache.dtype == "bfloat16":
        return "kv_cache.dtype is bfloat16, and a BF16 cache has none: leave kv_scales out"
    if not model.attention:
        return f"{model.name} has no attention layers that take them: leave kv_scales out"
    if config.quant.weights == "none" and config.scaling.on_gpus:
        return "vLLM on a GPU loads them beside FP8 weights only, and quant.weights is none: leave kv_scales out"
    return None


def _is_scale(value: float) -> bool:
    try:
        (as_stored,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:  # finite, but too large for fp32
        return False
    return bool(_SMALLEST_NORMAL <= as_stored <= _LARGEST)
