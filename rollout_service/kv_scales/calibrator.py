"""A replica's side of its KV cache: the scales of each version, and the choice between FP8 and BF16.

A replica measures after loading a version and before serving it, while the engine is paused and nothing is cached.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from typing import Protocol

from rollout_service.config import ServiceConfig
from rollout_service.errors import (
    EngineFailed,
    InsufficientStorage,
    InvalidRequest,
    KVCacheUnfit,
    NotFound,
    NotReady,
    RolloutServiceError,
)
from rollout_service.kv_scales.batch import CalibrationBatch
from rollout_service.kv_scales.fp8_error import saturates_nothing, unfit_layers, why_unfit, worst_errors
from rollout_service.kv_scales.scales import scales_from_amax
from rollout_service.metrics import table
from rollout_service.metrics.process import record
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import KVCacheChoice, KVCacheStatus
from rollout_service.protocol.kv_scales import KVMeasurement, KVScaleResult, LayerError
from rollout_service.runtime.rpc import IngestCalls
from rollout_service.store.manifest import Manifest

logger = logging.getLogger(__name__)

Ranks = tuple[KVMeasurement, ...]

PUBLISH_S = 2.0
"""Maximum time in seconds that a replica waits for the ingest to store a measurement; its engine is paused
meanwhile."""


class MeasuringEngine(Protocol):
    """The methods of the engine adapter that are used here."""

    async def measure_kv(self, sequences: list[list[int]], scales: dict[str, float] | None = None) -> Ranks: ...
    async def set_kv_scales(self, scales: dict[str, float] | None) -> None: ...


class KVScaleSource(Protocol):
    """Source of a version's scales that are not in its manifest, for ``WeightSync``."""

    status: KVCacheStatus | None
    """Status for the replica's reports."""
    error: str | None
    """Reason why a replica that has measured does not serve yet; also for its reports."""

    async def scales_for(self, manifest: Manifest) -> dict[str, float] | None: ...
    async def loaded(self, manifest: Manifest) -> dict[str, float] | None: ...


class NoKVScales:
    """The scale source of a BF16 cache, which has none."""

    def __init__(self, choice: KVCacheChoice | None = None) -> None:
        self.status = None if choice is None else KVCacheStatus(choice=choice)
        self.error: str | None = None

    async def scales_for(self, manifest: Manifest) -> None:
        """Return None: the version has no scales to load."""

    async def loaded(self, manifest: Manifest) -> None:
        """Return None: there is nothing to measure."""


class KVCalibrator:
    """The scale source of an FP8 cache: asks the ingest for a version's scales, or measures and publishes them."""

    def __init__(
        self,
        replica_id: str,
        engine: MeasuringEngine,
        ingest: IngestCalls,
        batch: CalibrationBatch,
        choice: KVCacheChoice | None,
        retry_s: float,
    ) -> None:
        """``choice``: an earlier finding that FP8 is accurate enough; None: this replica must measure that."""
        self._replica_id, self._engine, self._ingest = replica_id, engine, ingest
        self._batch, self._choice, self._retry_s = batch, choice, retry_s
        self._digest = ""
        """Digest of the version being loaded, if its manifest has no scales."""
        self._result: KVScaleResult | None = None
        """The stored scales of that version; None until they are known."""
        self._unpublished: tuple[int, str, Ranks] | None = None
        """Version, digest and measurement that the ingest has not stored yet. The version is not served before."""
        self.status = KVCacheStatus(choice=choice) if choice is not None else None
        self.error: str | None = None

    async def scales_for(self, manifest: Manifest) -> dict[str, float] | None:
        """Return the measured scales for loading a version; None: its manifest has them, or ``loaded`` measures them.

        First publishes this replica's measurement of that version, if there is one. Raises NotReady if the ingest does
        not answer or store it.
        """
        self._result = None
        if not manifest.awaits_kv_scales:
            return None
        # in a thread, since it takes long for 40 000 tensors
        self._digest = await asyncio.to_thread(lambda: manifest.digest)
        if self._unpublished is not None and self._unpublished[:2] == (manifest.version, self._digest):
            self._result = await self._publish(manifest.version, self._unpublished[2])
        else:
            self._result = await self._ingest.measured_kv_scales(manifest.version, self._digest)
        return None if self._result is None else self._result.scales

    async def loaded(self, manifest: Manifest) -> dict[str, float] | None:
        """Measure a version that was just loaded, if it has no scales, or the accuracy of FP8 is unknown.

        Return the version's scales that are not in its manifest. Raises KVCacheUnfit; NotFound if the version was
        removed meanwhile; EngineFailed; NotReady if the ingest does not store the measurement. The version must then
        not be served: ``scales_for`` publishes its scales later.
        """
        lacks_scales = manifest.awaits_kv_scales and self._result is None
        if lacks_scales or self._choice is None:
            await self._measure(manifest.version, lacks_scales)
        return None if self._result is None else self._result.scales

    async def _measure(self, version: int, lacks_scales: bool) -> None:
        started, sequences = time.perf_counter(), self._batch.sequences()
        try:
            ranks = await self._engine.measure_kv(sequences)
        except EngineFailed as error:
            if lacks_scales:
                raise EngineFailed(f"{error.message}; kv_cache.scales_policy: reuse needs no measurement") from error
            self._choice = await self._choose(_choose_unmeasured(error.message))
            self.status = KVCacheStatus(choice=self._choice)
            return
        errors = worst_errors(ranks)
        if lacks_scales:
            self._result = await self._publish(version, ranks)
            errors = await self._errors_with(self._result.scales, sequences, ranks, errors)
        if self._choice is None:
            self._choice = await self._judge(version, sequences, ranks)
        self._show(version, errors, time.perf_counter() - started)

    async def _publish(self, version: int, ranks: Ranks) -> KVScaleResult:
        """Send a measurement to the ingest; return the version's stored scales, which may be another replica's.

        Raises NotReady if the ingest does not answer or cannot store them.
        """
        self._unpublished = None
        try:
            async with asyncio.timeout(PUBLISH_S):
                return await self._ingest.publish_kv_scales(version, self._replica_id, ranks, self._digest)
        except NotFound:
            raise
        except (NotReady, InsufficientStorage, TimeoutError) as error:
            self._unpublished = version, self._digest, ranks
            why = str(error) or "the ingest does not answer"
            raise NotReady(f"the measured KV scales of version {version} are not stored yet: {why}") from error
        except RolloutServiceError as error:
            raise EngineFailed(f"version {version} has no KV scales: {error}") from error

    async def _errors_with(
        self, scales: dict[str, float] | None, sequences: list[list[int]], ranks: Ranks, errors: dict[str, LayerError]
    ) -> dict[str, LayerError]:
        """Load ``scales`` and return the errors of FP8 with them. ``errors``: those with the scales before, 1."""
        if scales is None:
            return errors
        await self._engine.set_kv_scales(scales)
        if not unfit_layers(errors) and saturates_nothing(ranks, scales):
            nothing = {"k_saturated": 0.0, "v_saturated": 0.0}  # FP8 rounds equally with any scale
            return {layer: error.model_copy(update=nothing) for layer, error in errors.items()}
        return worst_errors(await self._engine.measure_kv(sequences))

    async def _judge(self, version: int, sequences: list[list[int]], ranks: Ranks) -> KVCacheChoice:
        """Decide if FP8 is accurate enough with the best possible scales. Raises KVCacheUnfit."""
        judged_by = f"{self._replica_id}, version {version}"
        try:
            best = scales_from_amax([rank.amax for rank in ranks]).named()
        except InvalidRequest as error:
            return await self._choose(_choose_unmeasured(error.message))
        errors = worst_errors(await self._engine.measure_kv(sequences, best))
        if unfit := unfit_layers(errors):
            raise KVCacheUnfit(why_unfit(unfit, len(errors)), {"layers": unfit, "judged_by": judged_by})
        why = f"FP8 is accurate enough for all {len(errors)} layers, measured on {self._batch.origin}"
        choice = KVCacheChoice(dtype="fp8_e4m3", why=why, judged_by=judged_by)
        return await self._choose(choice)

    async def _choose(self, choice: KVCacheChoice) -> KVCacheChoice:
        """Record FP8 as the choice for all replicas, retrying. Raises KVCacheUnfit if another replica has chosen BF16
        before.

        Replicas measure different tokens. With half a fleet in FP8 and half in BF16, one version would be two policies.
        """
        while True:
            try:
                held = await self._ingest.choose_kv_cache(choice)
            except (NotReady, InsufficientStorage) as error:
                self.error = f"which dtype the KV cache has is not noted yet: {error}"
                logger.warning(self.error)
                await asyncio.sleep(self._retry_s)
                continue
            self.error = None
            if held.dtype != choice.dtype:
                raise KVCacheUnfit(held.why, {"judged_by": held.judged_by})
            return held

    def _show(self, version: int, errors: Mapping[str, LayerError], seconds: float) -> None:
        assert self._choice is not None
        unfit = unfit_layers(errors)
        if unfit:
            logger.error("version %d: %s", version, why_unfit(unfit, len(errors)))
        saturated = {layer: (_number(e.k_saturated), _number(e.v_saturated)) for layer, e in errors.items()}
        record(table.KV_CALIBRATION_SECONDS, seconds)
        logger.info("version %d: keys and values measured on %s in %.3f s", version, self._batch.origin, seconds)
        self.status = KVCacheStatus(
            choice=self._choice, saturated=saturated, measured_version=version, measured_s=seconds, unfit=unfit
        )


def starting_choice(dtype: str, model: ServedModel, known: KVCacheChoice | None) -> KVCacheChoice | None:
    """Return the dtype that a replica starts with; None: FP8, and the replica measures whether that is accurate enough.

    Args:
        dtype: ``kv_cache.dtype``.
        known: an earlier replica's choice. BF16, chosen with ``auto``, is ignored if FP8 is configured explicitly.
    """
    if dtype == "bfloat16":
        return KVCacheChoice(dtype="bfloat16", why="kv_cache.dtype says so")
    if model.is_multimodal:
        if dtype == "fp8_e4m3":
            raise ValueError(
                f"kv_cache.dtype is fp8_e4m3, and {model.name} is multimodal, whose KV scales are not known here: set "
                "it to auto, which keeps its cache in BF16"
            )
        return KVCacheChoice(dtype="bfloat16", why="KV scales of multimodal models are not known here")
    if not model.attention:
        why = "latent attention keeps neither keys nor values, and what FP8 costs it is not measured"
        return KVCacheChoice(dtype="bfloat16" if dtype == "auto" else "fp8_e4m3", why=why)
    return None if known is not None and known.dtype != "fp8_e4m3" and dtype != "auto" else known


async def choose_bf16(ingest: IngestCalls, why: str, judged_by: str) -> KVCacheChoice:
    """Record BF16 for all replicas of this log. Return it, or another replica's earlier choice. Raises NotReady."""
    logger.warning("the KV cache is kept in BF16: %s", why)
    return await ingest.choose_kv_cache(KVCacheChoice(dtype="bfloat16", why=why, judged_by=judged_by))


async def without_fp8(ingest: IngestCalls, choice: KVCacheChoice | None, why: str, replica_id: str) -> KVCacheChoice:
    """Return the cache of a replica whose engine cannot read FP8: BF16, with the reason ``why``. Raises NotReady.

    It is recorded for all replicas of this log. If a replica on another processor has already recorded FP8, that stays
    valid for replicas that can read it, and only this replica uses BF16.
    """
    if choice is None:
        choice = await choose_bf16(ingest, why, replica_id)
    if choice.dtype == "bfloat16":
        return choice
    return KVCacheChoice(dtype="bfloat16", why=why, judged_by=replica_id)


def with_kv_cache(config: ServiceConfig, choice: KVCacheChoice) -> ServiceConfig:
    """Return the configuration of an engine with the chosen cache."""
    policy = config.kv_cache.scales_policy if choice.dtype == "fp8_e4m3" else "unit"
    kv_cache = config.kv_cache.model_copy(update={"dtype": choice.dtype, "scales_policy": policy})
    return config.model_copy(update={"kv_cache": kv_cache})


def _number(share: float) -> float | None:
    return None if math.isnan(share) else share  # JSON has no NaN


def _choose_unmeasured(reason: str) -> KVCacheChoice:
    """Choose FP8 without a measurement, and log an error for it."""
    logger.error("whether FP8 is accurate enough for keys and values is not known: %s", reason)
    return KVCacheChoice(dtype="fp8_e4m3", why=f"not measured: {reason}")
