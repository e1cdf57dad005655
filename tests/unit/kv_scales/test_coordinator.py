"""The ingest's answers to replicas: the scales that all load, and the cache's dtype."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.errors import InsufficientStorage, LogCorrupt, NotFound, NotReady
from rollout_service.ingest.ingest import Ingest
from rollout_service.kv_scales import coordinator
from rollout_service.kv_scales.coordinator import KV_SCALES_FILE
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.protocol.kv_scales import KVMeasurement, KVScaleResult
from rollout_service.store.log import WeightLog
from tests.unit.ingest.trainer import Trainer, changed, config_of
from tests.unit.kv_scales.measured import measured, scales_of

RANKS = (measured((224, 448, 112)),)
SCALES = scales_of(1, 2, 0.5)
"""Of ``RANKS``."""
FP8 = KVCacheChoice(dtype="fp8_e4m3", why="accurate enough for all layers", judged_by="a, version 0")
BF16 = KVCacheChoice(dtype="bfloat16", why="not for 2 layers", judged_by="b, version 0")


@pytest.fixture
def config(model: Path, tmp_path: Path) -> ServiceConfig:
    return config_of(model, tmp_path / "log", kv_cache={"scales_policy": "calibrate"})


async def publish(ingest: Ingest, version: int, replica_id: str, *ranks: KVMeasurement) -> KVScaleResult:
    return await ingest.kv.publish_result(version, replica_id, ranks, (await ingest.status(version)).digest)


async def stored(ingest: Ingest, version: int) -> KVScaleResult | None:
    return await ingest.kv.measured(version, (await ingest.status(version)).digest)


class TestPublish:
    async def test_replicas_that_measured_side_by_side_get_the_same_scales(self, ingest):
        assert await stored(ingest, 0) is None
        measurements = publish(ingest, 0, "a", *RANKS), publish(ingest, 0, "b", measured((1, 1, 1)))
        first, second = await asyncio.gather(*measurements)
        assert first == second == await stored(ingest, 0)

    async def test_a_result_is_kept_although_its_replica_dies_meanwhile(self, ingest, log):
        publishing = asyncio.create_task(ingest.kv.publish_result(0, "a", RANKS, log.manifest(0).digest))
        await asyncio.sleep(0)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert (await publish(ingest, 0, "b", measured((1, 1, 1)))).scales == SCALES
        assert (log.folder(0) / KV_SCALES_FILE).is_file()

    @pytest.mark.parametrize(
        ("code", "instead"),
        [(errno.ENOSPC, "make room there"), (errno.EIO, "it is tried again until the disk takes it")],
    )
    async def test_scales_that_the_disk_refuses_are_not_given_to_anyone(self, code, instead, ingest, log, monkeypatch):
        def refuse(*_: Any) -> None:
            raise OSError(code, "the disk says so")

        with monkeypatch.context() as patch:
            patch.setattr(coordinator, "write_result", refuse)
            expected = rf"^the KV scales of version 0 .* {log.root}: .*the disk says so: {instead}$"
            with pytest.raises(InsufficientStorage, match=expected):
                await publish(ingest, 0, "a", *RANKS)
        assert await stored(ingest, 0) is None
        assert (await publish(ingest, 0, "b", *RANKS)).replica_id == "b"


class TestStatus:
    async def test_the_digest_stays_when_scales_are_measured(self, ingest, trainer, weights, log):
        awaiting = await trainer.push(1, changed(weights, 1.0))
        assert awaiting.kv_scales_from == "calibrate" and awaiting.digest == log.manifest(1).digest
        assert await ingest.status(1) == awaiting
        await publish(ingest, 1, "a", *RANKS)
        status = await ingest.status(1)
        assert (status.kv_scales_from, status.digest) == ("calibrate", awaiting.digest)
        await publish(ingest, 1, "b", measured((1, 1, 1)))
        assert await ingest.status(1) == status
        sent = await trainer.push(2, changed(weights, 1.0), SCALES)
        assert sent.digest == log.manifest(1).replace(kv_scales=SCALES).digest != status.digest

    async def test_after_a_failed_measurement_scales_are_those_of_unit(self, ingest):
        awaiting = await ingest.status(0)
        await publish(ingest, 0, "a", measured((0, 0, 0)))
        status = await ingest.status(0)
        assert (status.kv_scales_from, status.digest) == ("unit", awaiting.digest)

    async def test_it_is_the_same_for_every_version_after_a_restart(self, ingest, config, trainer, weights):
        first = await publish(ingest, 0, "a", *RANKS)
        await trainer.push(1, changed(weights, 1.0))
        second = await publish(ingest, 1, "a", measured((448, 448, 448)))
        before = await ingest.versions()
        await ingest.stop()
        again = Ingest(config)
        await again.start()
        assert await again.versions() == before and len({status.digest for status in before}) == 2
        assert (await stored(again, 0), await stored(again, 1)) == (first, second)
        await again.stop()

    async def test_an_ingest_does_not_start_on_scales_that_are_torn(self, ingest, config, log):
        await publish(ingest, 0, "a", *RANKS)
        await ingest.stop()
        path = log.folder(0) / KV_SCALES_FILE
        path.write_text(path.read_text()[:50])
        with pytest.raises(LogCorrupt, match=str(path)):
            await Ingest(config).start()


class TestCacheDtype:
    async def test_the_first_choice_holds_for_all_and_over_a_restart(self, ingest, config):
        assert ingest.kv.kv_cache_choice() is None
        answers = await asyncio.gather(ingest.kv.choose_kv_cache(FP8), ingest.kv.choose_kv_cache(BF16))
        assert answers == [FP8, FP8] and ingest.kv.kv_cache_choice() == FP8
        await ingest.stop()
        again = Ingest(config)
        await again.start()
        assert again.kv.kv_cache_choice() == FP8 and await again.kv.choose_kv_cache(BF16) == FP8
        await again.stop()

    async def test_fp8_asked_for_by_name_takes_the_place_of_bf16(self, config, log):
        by_name = config.kv_cache.model_copy(update={"dtype": "fp8_e4m3"})
        ingest = Ingest(config.model_copy(update={"kv_cache": by_name}))
        await ingest.start()
        log.set_kv_cache(BF16)
        assert await ingest.kv.choose_kv_cache(FP8) == FP8 and log.kv_cache() == FP8
        await ingest.stop()

    async def test_a_choice_that_the_disk_refuses_holds_for_nobody(self, ingest, log, monkeypatch):
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(WeightLog, "set_kv_cache", full)
            with pytest.raises(InsufficientStorage, match="choice of the KV cache's dtype cannot be kept"):
                await ingest.kv.choose_kv_cache(FP8)
        assert ingest.kv.kv_cache_choice() is None and await ingest.kv.choose_kv_cache(FP8) == FP8


class TestOtherWeights:
    async def test_their_replica_neither_gets_nor_publishes_scales(self, ingest):
        digest = (await ingest.status(0)).digest
        with pytest.raises(NotReady, match=f"version 0 has digest {digest} in the ingest's log, not 00ff"):
            await ingest.kv.measured(0, "00ff")
        with pytest.raises(NotFound, match="log, not 00ff"):
            await ingest.kv.publish_result(0, "old", RANKS, "00ff")
        assert await stored(ingest, 0) is None

    @pytest.mark.parametrize(("dtype", "awaits"), [("auto", False), ("fp8_e4m3", True)])
    async def test_versions_await_no_scales_once_auto_came_to_bf16(self, config, weights, log, dtype, awaits):
        kv_cache = config.kv_cache.model_copy(update={"dtype": dtype})
        config = config.model_copy(update={"kv_cache": kv_cache})
        for version in (1, 2):
            ingest = Ingest(config)
            await ingest.start()
            await ingest.kv.choose_kv_cache(BF16)
            await Trainer(ingest).push(version, changed(weights, float(version)))
            await ingest.stop()
            assert log.manifest(version).awaits_kv_scales == awaits
