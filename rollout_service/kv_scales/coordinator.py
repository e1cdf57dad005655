"""The ingest's part of calibrating KV scales: which replica measures a version, and the scales that all load."""

import asyncio
import logging
from collections.abc import Sequence

from rollout_service.config import ServiceConfig
from rollout_service.errors import InsufficientStorage, NotFound, NotReady
from rollout_service.fleet.registry import FleetTable
from rollout_service.kv_scales.calibration import CalibrationLease, KVCalibration
from rollout_service.kv_scales.measurement import KVMeasurement
from rollout_service.kv_scales.policy import KVScalesRule
from rollout_service.kv_scales.result import KVScaleResult
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.store.durable_io import DISK_FULL
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest
from rollout_service.tasks import Changes, ShieldedTasks, Turns

logger = logging.getLogger(__name__)


class KVScaleCoordinator:
    """Elects the replica that calibrates, publishes its scales, and keeps the choice of the cache's dtype."""

    def __init__(
        self, config: ServiceConfig, log: WeightLog, rule: KVScalesRule, fleet: FleetTable, changes: Changes
    ) -> None:
        self._log, self._rule, self._changes = log, rule, changes
        self._falls_back = config.kv_cache.dtype == "auto"
        self._poll_s = config.weights.poll_s
        self._calibration = KVCalibration(config.kv_cache.calibration, log, rule, fleet.is_loading)
        self._settling, self._choosing = Turns(), Turns()
        self._unabandoned = ShieldedTasks()

    def remember(self, version: int) -> None:
        """Take up what the log has of a committed version. Raises LogCorrupt."""
        self._calibration.remember(version)
        self._note(self._log.kv_cache())

    def with_scales(self, manifest: Manifest) -> Manifest:
        """A committed version with the scales that it awaited, if they are known. Raises LogCorrupt."""
        settled = self._calibration.settled(manifest.version) if manifest.awaits_kv_scales else None
        if settled is None:
            return manifest
        came_from = "unit" if settled.scales is None else "calibrate"
        return manifest.model_copy(update={"kv_scales": settled.scales, "kv_scales_from": came_from})

    async def turn(self, version: int, replica_id: str, digest: str | None = None) -> CalibrationLease:
        """What a replica is to do about the scales of a version that awaits them; waits while another measures.

        ``digest``: of the manifest that the replica has; None: not compared. Raises NotReady after ``poll_s`` or for
        another version of that number, NotFound, or LogCorrupt.
        """
        await self._require_same(version, digest)
        turns: list[CalibrationLease] = []

        def given() -> bool:
            turn = self._calibration.turn(version, replica_id)
            turns.extend([] if turn is None else [turn])
            return bool(turns)

        if not await self._changes.wait(given, self._poll_s):
            raise NotReady(f"another replica still measures the KV scales of version {version}")
        return turns[-1]

    async def settle(
        self, version: int, replica_id: str, ranks: Sequence[KVMeasurement], digest: str | None = None
    ) -> KVScaleResult:
        """Take in what a replica measured; returns what the version has from now on.

        Raises NotFound, LogCorrupt, or InsufficientStorage where the disk does not take it: send it again.
        """
        try:
            await self._require_same(version, digest)
        except NotReady as error:  # what was measured is of no use, and never will be
            raise NotFound(error.message) from error
        settled = await self._unabandoned.run(self._settle(version, replica_id, ranks))
        await self._changes.notify()
        return settled

    def choice(self) -> KVCacheChoice | None:
        """What a replica chose for the KV cache; None: it has not been measured yet. Raises LogCorrupt."""
        return self._log.kv_cache()

    async def choose(self, choice: KVCacheChoice) -> KVCacheChoice:
        """Keep a replica's choice, durably, unless there is one already; returns the one that holds for all.

        A BF16 cache that was chosen for ``kv_cache.dtype: auto`` does not hold where FP8 is asked for by name. Raises
        LogCorrupt, or InsufficientStorage where the disk does not take it: send it again.
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
            self._note(choice)
            return choice

    async def close(self) -> None:
        """Write nothing any more; what is being written is finished."""
        await self._settling.close()
        await self._choosing.close()

    async def _require_same(self, version: int, digest: str | None) -> None:
        """Scales of other weights that had the same number, before a log was restored from a backup, are not these."""
        if digest is None:
            return
        head = self._log.head()
        if head is not None and head.version == version:
            known = head.digest
        else:
            known = (await asyncio.to_thread(self._log.manifest, version)).digest
        if known != digest:
            raise NotReady(f"version {version} is {known} in the ingest's log, and not {digest}: look again")

    def _note(self, choice: KVCacheChoice | None) -> None:
        self._rule.fp8 = not (self._falls_back and choice is not None and choice.dtype == "bfloat16")

    async def _settle(self, version: int, replica_id: str, ranks: Sequence[KVMeasurement]) -> KVScaleResult:
        async with self._settling:
            try:
                settled = await asyncio.to_thread(self._calibration.settle, version, replica_id, ranks)
            except OSError as error:  # the replica waits, whichever it is
                instead = "make room there" if error.errno in DISK_FULL else "it is tried again until the disk takes it"
                raise InsufficientStorage(
                    f"the KV scales of version {version} cannot be kept in {self._log.root}: {error}: {instead}"
                ) from error
        if settled.error is not None:
            logger.error("version %d keeps the KV scales of before: %s", version, settled.error)
        else:
            logger.info("version %d: KV scales measured on %d tokens", version, settled.tokens)
        return settled
