"""A replica's part in the scales of its FP8 KV cache: measures them when it is its turn, and whether FP8 does at all.

It works between loading a version and serving it, while the engine is closed and nothing is cached.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

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
from rollout_service.kv_scales.calibration import CalibrationLease
from rollout_service.kv_scales.fp8_error import LayerError, unfit_layers, why_unfit
from rollout_service.kv_scales.measurement import KVMeasurement, saturates_nothing, worst_errors
from rollout_service.kv_scales.result import KVScaleResult
from rollout_service.kv_scales.scales import ScaledFrom, largest_of_ranks, layer_scales, named_scales
from rollout_service.metrics import table
from rollout_service.metrics.process import record
from rollout_service.protocol.fleet import KVCacheChoice, KVCacheStatus
from rollout_service.rpc import ask
from rollout_service.store.manifest import Manifest

logger = logging.getLogger(__name__)

Ranks = tuple[KVMeasurement, ...]


class MeasuringEngine(Protocol):
    """What is needed of the engine adapter."""

    async def measure_kv(self, sequences: list[list[int]], scales: dict[str, float] | None = None) -> Ranks: ...
    async def set_kv_scales(self, scales: dict[str, float] | None) -> None: ...


class KVScales(Protocol):
    """What ``WeightSync`` calls around the loading of a version."""

    status: KVCacheStatus | None
    """For the replica's reports."""
    error: str | None
    """Why the replica that has measured does not serve yet; for its reports, too."""

    async def scales_for(self, manifest: Manifest) -> dict[str, float] | None: ...
    async def loaded(self, manifest: Manifest) -> None: ...


class NoKVScales:
    """For a BF16 cache."""

    def __init__(self, choice: KVCacheChoice | None = None) -> None:
        self.status = None if choice is None else KVCacheStatus(choice=choice)
        self.error: str | None = None

    async def scales_for(self, manifest: Manifest) -> None:
        """There are none, or nothing uses them."""

    async def loaded(self, manifest: Manifest) -> None:
        """Nothing to measure."""


class KVCalibrator:
    """For an FP8 cache."""

    def __init__(
        self,
        replica_id: str,
        engine: MeasuringEngine,
        ingest: Any,
        batch: CalibrationBatch,
        choice: KVCacheChoice | None,
        retry_s: float,
    ) -> None:
        """``ingest``: handle of its deployment. ``choice``: that FP8 does; None: this replica is to find out."""
        self._replica_id, self._engine, self._ingest = replica_id, engine, ingest
        self._batch, self._choice, self._retry_s = batch, choice, retry_s
        self._turn: CalibrationLease | None = None
        self._digest = ""
        self.status = KVCacheStatus(choice=choice) if choice is not None else None
        self.error: str | None = None

    async def scales_for(self, manifest: Manifest) -> dict[str, float] | None:
        """Scales to load a version with that are not in its manifest. Raises NotReady while another measures them."""
        self._turn = None
        if not manifest.awaits_kv_scales:
            return None
        self._digest = await asyncio.to_thread(lambda: manifest.digest)  # of 40 000 tensors, it takes a while
        self._turn = await ask(self._ingest, "kv_turn", manifest.version, self._replica_id, self._digest)
        return self._turn.scales

    async def loaded(self, manifest: Manifest) -> None:
        """Measure a version that was just loaded, if it is this replica's turn or nobody knows yet whether FP8 does.

        Raises KVCacheUnfit; NotFound if the version was removed meanwhile; EngineFailed.
        """
        measures = self._turn is not None and self._turn.measures
        if not measures and self._choice is not None:
            return
        started, sequences = time.perf_counter(), self._batch.sequences()
        try:
            ranks = await self._engine.measure_kv(sequences)
        except EngineFailed as error:
            if measures:
                raise EngineFailed(f"{error.message}; kv_cache.scales_policy: reuse needs no measurement") from error
            self._choice = await self._choose(_unmeasured(error.message))
            self.status = KVCacheStatus(choice=self._choice)
            return
        errors = worst_errors(ranks)
        if self._turn is not None and measures:
            errors = await self._settled(manifest.version, self._turn, sequences, ranks, errors)
        if self._choice is None:
            self._choice = await self._judged(manifest.version, sequences, ranks)
        self._show(manifest.version, errors, time.perf_counter() - started)

    async def _settled(
        self,
        version: int,
        turn: CalibrationLease,
        sequences: list[list[int]],
        ranks: Ranks,
        errors: dict[str, LayerError],
    ) -> dict[str, LayerError]:
        """Publish what was measured and take the scales that hold for all; returns the errors with these."""
        settled = await self._publish(version, ranks)
        if settled.scales == turn.scales:
            return errors
        await self._engine.set_kv_scales(settled.scales)
        if not unfit_layers(errors) and saturates_nothing(ranks, settled.scales):
            nothing = {"k_saturated": 0.0, "v_saturated": 0.0}  # and FP8 rounds alike whatever the scale
            return {layer: error.model_copy(update=nothing) for layer, error in errors.items()}
        return worst_errors(await self._engine.measure_kv(sequences))

    async def _publish(self, version: int, ranks: Ranks) -> KVScaleResult:
        while True:
            try:
                settled: KVScaleResult = await ask(
                    self._ingest, "kv_settle", version, self._replica_id, ranks, self._digest
                )
            except (NotReady, InsufficientStorage) as error:  # closed until then: nobody else knows these scales
                self.error = f"the KV scales of version {version} are measured and wait: {error}"
                logger.warning(self.error)
                await asyncio.sleep(self._retry_s)
                continue
            except NotFound:
                raise
            except RolloutServiceError as error:
                raise EngineFailed(f"version {version} has no KV scales: {error}") from error
            self.error = None
            return settled

    async def _judged(self, version: int, sequences: list[list[int]], ranks: Ranks) -> KVCacheChoice:
        """Whether the best scales that there are make FP8 bearable. Raises KVCacheUnfit."""
        judged_by = f"{self._replica_id}, version {version}"
        try:
            best = named_scales(layer_scales(largest_of_ranks([rank.amax for rank in ranks]), ScaledFrom()))
        except InvalidRequest as error:
            return await self._choose(_unmeasured(error.message))
        errors = worst_errors(await self._engine.measure_kv(sequences, best))
        if unfit := unfit_layers(errors):
            raise KVCacheUnfit(why_unfit(unfit, len(errors)), {"layers": unfit, "judged_by": judged_by})
        why = f"all {len(errors)} layers bear it, measured on {self._batch.origin}"
        choice = KVCacheChoice(dtype="fp8_e4m3", why=why, judged_by=judged_by)
        return await self._choose(choice)

    async def _choose(self, choice: KVCacheChoice) -> KVCacheChoice:
        """FP8, once it is noted for all replicas. Raises KVCacheUnfit if another one has found otherwise before.

        They measure different tokens: half a fleet in FP8 and half in BF16 would be two policies under one version.
        """
        while True:
            try:
                held: KVCacheChoice = await ask(self._ingest, "choose_kv_cache", choice)
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


def _number(share: float) -> float | None:
    return None if math.isnan(share) else share  # JSON has no NaN


def _unmeasured(reason: str) -> KVCacheChoice:
    """FP8 was asked for, and whether it does is not known: say so, to the whole fleet."""
    logger.error("whether FP8 does for keys and values is not known: %s", reason)
    return KVCacheChoice(dtype="fp8_e4m3", why=f"not measured: {reason}")
