"""The ingest's side of KV scales: the scales of each version, and the dtype of the KV cache.

    <root>/<version>/kv_scales.json    measured scales of a version: JSON and its xxh3-128, beside the manifest
    <root>/KV_CACHE                    dtype of the cache, FP8 or BF16, once it was measured

The commit of a version decides which scales replicas load, and stores that in the manifest as ``kv_scales_from``:

    trainer      the scales that came with the version
    reuse        the scales of the previous version
    unit         1 everywhere
    calibrate    the first measurement that a replica publishes. Each replica measures a version without scales
                 before it serves the version, publishes, and loads the stored result, so that all serve the same
"""

import asyncio
import logging
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from rollout_service.config import ServiceConfig
from rollout_service.errors import InsufficientStorage, InvalidManifest, InvalidRequest, LogCorrupt, NotFound, NotReady
from rollout_service.kv_scales.scales import TENSORS, scales_from_amax
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.protocol.kv_scales import KVMeasurement, KVScaleResult
from rollout_service.runtime.tasks import ClosableLock, ShieldedTasks
from rollout_service.store.durable_io import DISK_FULL, read_sealed, write_sealed
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest

logger = logging.getLogger(__name__)

KV_SCALES_FILE = "kv_scales.json"
_SMALLEST_NORMAL = 2.0**-126
_LARGEST = (2 - 2**-7) * 2.0**127 / 448
"""Largest valid scale: times the largest FP8 code, it is the largest BF16 number. A larger scale would overflow."""


class VersionScales:
    """The scales of each version, as the log stores them."""

    def __init__(self, config: ServiceConfig, model: ServedModel, log: WeightLog) -> None:
        """Raises ValueError for the policy ``calibrate`` if no scales can be used."""
        self._config, self._model, self._log = config.kv_cache, model, log
        self._no_use = _no_use(config, model)
        # with dtype auto, a model without such layers has a BF16 cache, and nothing is measured
        in_bf16 = self._config.dtype == "auto" and not model.attention
        if self._config.scales_policy == "calibrate" and self._no_use and not in_bf16:
            raise ValueError(f"kv_cache.scales_policy is calibrate, but {self._no_use}")
        self._last: KVScaleResult | None = None
        """The last result that this process stored."""
        self._newest_version = -1
        self.newest: dict[str, float] | None = None
        """Scales of the newest version with known scales; None: 1 everywhere."""

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

    def with_scales(self, manifest: Manifest, scales: dict[str, float] | None) -> Manifest:
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
            self._take(manifest.version, result.scales)

    def restore(self, newest: Manifest) -> None:
        """Load the newest known scales of the log when an ingest starts. Raises LogCorrupt."""
        self._log.kv_cache()  # damage is found at the start, not at a later commit
        for version in reversed(self._log.versions()):
            manifest = newest if version == newest.version else self._log.manifest(version)
            manifest = self.with_published(manifest)
            if not manifest.awaits_kv_scales:
                self._newest_version, self.newest = version, manifest.kv_scales
                return

    def _fell_back(self) -> bool:
        """Return True if ``kv_cache.dtype: auto`` has resolved to BF16, so that nothing is measured."""
        choice = self._log.kv_cache()
        return self._config.dtype == "auto" and choice is not None and choice.dtype == "bfloat16"

    def _take(self, version: int, scales: dict[str, float] | None) -> None:
        """Store scales as the newest, unless those of a newer version are known: an old version may be published
        late."""
        if version >= self._newest_version:
            self._newest_version, self.newest = version, scales

    # --- what is measured

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
        self._take(version, result.scales)
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
        scales, problem = self.newest, None
        try:
            measured = scales_from_amax([rank.amax for rank in ranks]).named()
            self.check(measured)
            scales = measured
        except InvalidRequest as error:
            problem = error.message
        tokens = ranks[0].tokens
        return KVScaleResult(version=version, scales=scales, replica_id=replica_id, tokens=tokens, error=problem)


class KVScaleCoordinator:
    """KV scales in the ingest, for replicas: the measured scales of versions, and the dtype of the KV cache."""

    def __init__(self, config: ServiceConfig, log: WeightLog, scales: VersionScales) -> None:
        self._log, self._scales = log, scales
        self._falls_back = config.kv_cache.dtype == "auto"
        self._publishing, self._choosing = ClosableLock(), ClosableLock()
        # storing scales must finish although the replica disconnects
        self._shielded = ShieldedTasks()

    async def measured(self, version: int, digest: str) -> KVScaleResult | None:
        """Return the stored scales of a version that awaits them; None: nobody has measured it yet.

        ``digest``: digest of the replica's manifest. Raises NotReady for another version of that number, NotFound, or
        LogCorrupt.
        """
        await self._require_same(version, digest)
        return self._scales.published(version)

    async def publish_result(
        self, version: int, replica_id: str, ranks: Sequence[KVMeasurement], digest: str
    ) -> KVScaleResult:
        """Store scales from a replica's measurement, unless there are some already; return those that all load.

        Raises NotFound, LogCorrupt, or InsufficientStorage if the disk is full: send it again.
        """
        try:
            await self._require_same(version, digest)
        except NotReady as error:  # the measurement can never be used
            raise NotFound(error.message) from error
        return await self._shielded.run(self._publish(version, replica_id, ranks))

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

    async def _require_same(self, version: int, digest: str) -> None:
        """Raise NotReady for another version of that number, from before the log was restored from a backup."""
        head = self._log.head()
        if head is not None and head.version == version:
            known = head.digest
        else:
            known = (await asyncio.to_thread(self._log.manifest, version)).digest
        if known != digest:
            raise NotReady(
                f"version {version} has digest {known} in the ingest's log, not {digest}: read the log again"
            )

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
        return KVScaleResult.model_validate_json(text)
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
