"""Where replicas turn to that load versions whose KV scales they measure: the ingest's part of it."""

import asyncio
import logging
from collections.abc import Sequence

from rollout_service.calibration.measurement import KVMeasurement
from rollout_service.config import ServiceConfig
from rollout_service.errors import InsufficientStorage, NotReady
from rollout_service.tasks import Changes, Turns, Unabandoned
from rollout_service.types import KVCacheChoice
from rollout_service.weights.files import DISK_FULL
from rollout_service.weights.fleet import FleetTable
from rollout_service.weights.kv_calibration import KVCalibration, Turn
from rollout_service.weights.kv_scales import KVScalesRule
from rollout_service.weights.kv_settled import Settled
from rollout_service.weights.log import WeightLog
from rollout_service.weights.manifest import Manifest

logger = logging.getLogger(__name__)


class KVDesk:
    """Gives turns, settles scales, and keeps the choice of the cache's dtype."""

    def __init__(
        self, config: ServiceConfig, log: WeightLog, rule: KVScalesRule, fleet: FleetTable, changes: Changes
    ) -> None:
        self._log, self._rule, self._changes = log, rule, changes
        self._falls_back = config.kv_cache.dtype == "auto"
        self._poll_s = config.weights.poll_s
        self._calibration = KVCalibration(config.kv_cache.calibration, log, rule, fleet.is_loading)
        self._settling, self._choosing = Turns(), Turns()
        self._unabandoned = Unabandoned()

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

    async def turn(self, version: int, replica_id: str) -> Turn:
        """What a replica is to do about the scales of a version that awaits them; waits while another measures.

        Raises NotReady after ``poll_s``, or LogCorrupt.
        """
        turns: list[Turn] = []

        def given() -> bool:
            turn = self._calibration.turn(version, replica_id)
            turns.extend([] if turn is None else [turn])
            return bool(turns)

        if not await self._changes.wait(given, self._poll_s):
            raise NotReady(f"another replica still measures the KV scales of version {version}")
        return turns[-1]

    async def settle(self, version: int, replica_id: str, ranks: Sequence[KVMeasurement]) -> Settled:
        """Take in what a replica measured; returns what the version has from now on.

        Raises NotFound, LogCorrupt, or InsufficientStorage where the disk does not take it: send it again.
        """
        settled = await self._unabandoned.run(self._settle(version, replica_id, ranks))
        await self._changes.notify()
        return settled

    def choice(self) -> KVCacheChoice | None:
        """What a replica chose for the KV cache; None: it has not been measured yet. Raises LogCorrupt."""
        return self._log.kv_cache()

    async def choose(self, choice: KVCacheChoice) -> KVCacheChoice:
        """Keep a replica's choice, durably, unless there is one already; returns the one that holds."""
        async with self._choosing:
            if (known := self._log.kv_cache()) is not None:
                return known
            logger.info("KV cache: %s, since %s", choice.dtype, choice.why)
            await asyncio.to_thread(self._log.set_kv_cache, choice)
            self._note(choice)
            return choice

    async def close(self) -> None:
        """Write nothing any more; what is being written is finished."""
        await self._settling.close()
        await self._choosing.close()

    def _note(self, choice: KVCacheChoice | None) -> None:
        self._rule.fp8 = not (self._falls_back and choice is not None and choice.dtype == "bfloat16")

    async def _settle(self, version: int, replica_id: str, ranks: Sequence[KVMeasurement]) -> Settled:
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
        logger.info(
            "version %d: KV scales %s on %d tokens; drift since the version before: %s; saturated with its scales: %s",
            version, settled.how, settled.tokens, settled.drift, settled.saturated,
        )  # fmt: skip
        return settled
