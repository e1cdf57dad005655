"""A replica's choice between an FP8 and a BF16 KV cache.

The first replica of a log measures after it has loaded its first version and before it serves.
"""

import asyncio
import logging
import math
import random
from collections.abc import Mapping
from typing import Protocol

from rollout_service.config import ServiceConfig
from rollout_service.errors import InsufficientStorage, InvalidRequest, KVCacheUnfit, NotReady
from rollout_service.kv_scales.fp8_error import unfit_layers, why_unfit, worst_errors
from rollout_service.kv_scales.scales import scales_from_amax
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import KVCacheChoice, KVCacheStatus
from rollout_service.protocol.kv_scales import KVMeasurement, LayerError
from rollout_service.runtime.rpc import IngestCalls, until_answered

logger = logging.getLogger(__name__)

Ranks = tuple[KVMeasurement, ...]

_SEQUENCES, _TOKENS = 16, 64
"""Number of measured sequences, and length of each in tokens."""


class MeasuringEngine(Protocol):
    """The method of the engine adapter that is used here."""

    async def measure_kv(self, sequences: list[list[int]], scales: dict[str, float] | None = None) -> Ranks: ...


class CacheChooser:
    """Chooses a replica's KV cache, once: FP8 if it is accurate enough for the first version that the replica loads."""

    def __init__(
        self,
        replica_id: str,
        engine: MeasuringEngine,
        ingest: IngestCalls,
        sequences: list[list[int]],
        choice: KVCacheChoice | None,
        retry_s: float,
        *,
        falls_back: bool,
    ) -> None:
        """Create the chooser.

        Args:
            sequences: token ids to measure.
            choice: the known choice. None: this replica must measure.
            falls_back: the cache is BF16 if FP8 is not accurate with the version's own scales. False: FP8 is wanted,
                and judged with the best scales, which the trainer may send later.
        """
        self._falls_back = falls_back
        self._replica_id, self._engine, self._ingest = replica_id, engine, ingest
        self._sequences, self._retry_s = sequences, retry_s
        self.status = None if choice is None else KVCacheStatus(choice=choice)
        """Status for the replica's reports; None: nothing is chosen yet."""
        self._measured_with: dict[str, float] | None = None
        """The scales that the status is about."""
        self.error: str | None = None
        """Reason why a replica that has measured does not serve yet; also for its reports."""

    async def loaded(self, version: int, kv_scales: dict[str, float] | None) -> None:
        """Measure the version that was just loaded with these scales, unless the cache is chosen. Call while
        the engine is paused. Raises KVCacheUnfit, or EngineFailed if it could not be measured."""
        if self.status is not None:
            if kv_scales != self._measured_with:
                self.status = KVCacheStatus(choice=self.status.choice)
            return
        self._measured_with = kv_scales
        try:
            ranks = await self._engine.measure_kv(self._sequences)
        except InvalidRequest as error:
            self.status = KVCacheStatus(choice=await self._choose(_choose_unmeasured(error.message)))
            return
        choice = await self._judge(version, ranks)
        self.status = _status(choice, version, worst_errors(ranks))

    async def _judge(self, version: int, ranks: Ranks) -> KVCacheChoice:
        """Decide if FP8 is accurate enough. Raises KVCacheUnfit."""
        judged_by = f"{self._replica_id}, version {version}"
        try:
            best = scales_from_amax([rank.amax for rank in ranks])
        except InvalidRequest as error:
            return await self._choose(_choose_unmeasured(error.message))
        if not self._falls_back:
            ranks = await self._engine.measure_kv(self._sequences, best.named())
        errors = worst_errors(ranks)
        if unfit := unfit_layers(errors):
            raise KVCacheUnfit(why_unfit(unfit, len(errors)), {"layers": unfit, "judged_by": judged_by})
        why = f"FP8 is accurate enough for all {len(errors)} layers, measured on random tokens"
        return await self._choose(KVCacheChoice(dtype="fp8_e4m3", why=why, judged_by=judged_by))

    async def _choose(self, choice: KVCacheChoice) -> KVCacheChoice:
        """Record FP8 as the choice for all replicas, retrying. Raises KVCacheUnfit if another replica has chosen BF16
        before.

        With half a fleet in FP8 and half in BF16, one version would be two policies.
        """
        while True:
            try:
                held = await self._ingest.choose_kv_cache(choice)
            except (NotReady, InsufficientStorage) as error:
                self.error = f"the choice of the KV cache's dtype is not stored yet: {error}"
                logger.warning(self.error)
                await asyncio.sleep(self._retry_s)
                continue
            self.error = None
            if held.dtype != choice.dtype:
                raise KVCacheUnfit(held.why, {"judged_by": held.judged_by})
            return held


def _status(choice: KVCacheChoice, version: int, errors: Mapping[str, LayerError]) -> KVCacheStatus:
    """Return a status with the errors of FP8 with the version's own scales."""
    unfit = unfit_layers(errors)
    if unfit:
        logger.error("version %d: %s", version, why_unfit(unfit, len(errors)))
    saturated = {layer: (_number(e.k_saturated), _number(e.v_saturated)) for layer, e in errors.items()}
    return KVCacheStatus(choice=choice, saturated=saturated, measured_version=version, unfit=unfit)


def random_sequences(vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Return token ids to measure, the same for every replica."""
    chosen = random.Random(0)
    return [[chosen.randrange(vocab_size) for _ in range(min(_TOKENS, max_model_len))] for _ in range(_SEQUENCES)]


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


async def choose_bf16(ingest: IngestCalls, why: str, judged_by: str, retry_s: float) -> KVCacheChoice:
    """Record BF16 for all replicas of this log, retrying. Return it, or another replica's earlier choice."""
    logger.warning("the KV cache is kept in BF16: %s", why)
    choice = KVCacheChoice(dtype="bfloat16", why=why, judged_by=judged_by)
    return await until_answered(lambda: ingest.choose_kv_cache(choice), retry_s)


async def without_fp8(
    ingest: IngestCalls, choice: KVCacheChoice | None, why: str, replica_id: str, retry_s: float
) -> KVCacheChoice:
    """Return the cache of a replica whose engine cannot read FP8: BF16, with the reason ``why``.

    It is recorded for all replicas of this log. If a replica on another processor has already recorded FP8, that stays
    valid for replicas that can read it, and only this replica uses BF16.
    """
    if choice is None:
        choice = await choose_bf16(ingest, why, replica_id, retry_s)
    if choice.dtype == "bfloat16":
        return choice
    return KVCacheChoice(dtype="bfloat16", why=why, judged_by=replica_id)


def with_kv_cache(config: ServiceConfig, choice: KVCacheChoice) -> ServiceConfig:
    """Return the configuration of an engine with the chosen cache."""
    return config.model_copy(update={"kv_cache": config.kv_cache.model_copy(update={"dtype": choice.dtype})})


def _number(share: float) -> float | None:
    return None if math.isnan(share) else share  # JSON has no NaN


def _choose_unmeasured(reason: str) -> KVCacheChoice:
    """Choose FP8 without a measurement, and log an error for it."""
    logger.error("the error of FP8 keys and values was not measured, and FP8 is used: %s", reason)
    return KVCacheChoice(dtype="fp8_e4m3", why=f"not measured: {reason}")
