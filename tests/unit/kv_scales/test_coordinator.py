"""What replicas ask the ingest for: the lease to measure, scales that hold for all, and the cache's dtype."""

import asyncio
import errno
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.errors import InsufficientStorage, LogCorrupt, NotFound, NotReady
from rollout_service.ingest.ingest import Ingest
from rollout_service.kv_scales import coordinator
from rollout_service.kv_scales.coordinator import KV_SCALES_FILE
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.protocol.kv_scales import CalibrationLease
from rollout_service.store.log import WeightLog
from tests.unit.ingest.trainer import Trainer, Weights, changed, config_of, replica, settle
from tests.unit.kv_scales.measured import measured, scales_of

LONG_S = 60.0
RANKS = (measured((448, 896, 224)),)
SCALES = scales_of(1, 2, 0.5)
"""Of ``RANKS``, with a margin of 1."""


def lease(replica_id: str) -> CalibrationLease:
    """Of version 0."""
    return CalibrationLease(version=0, replica_id=replica_id, scales=None)


FP8 = KVCacheChoice(dtype="fp8_e4m3", why="accurate enough for all layers", judged_by="a, version 0")
BF16 = KVCacheChoice(dtype="bfloat16", why="not for 2 layers", judged_by="b, version 0")


@pytest.fixture
def times(request: pytest.FixtureRequest) -> dict[str, float]:
    """Nobody is dead and no poll ends before the test does, unless it says so."""
    return {"poll_s": LONG_S, "dead_after_s": 3 * LONG_S, **getattr(request, "param", {})}


@pytest.fixture
def config(model: Path, tmp_path: Path, times: dict[str, object]) -> ServiceConfig:
    kv_cache = {"scales_policy": "calibrate", "calibration": {"margin": 1.0}}
    return config_of(model, tmp_path / "log", kv_cache=kv_cache, weights=times)


async def loads(ingest: Ingest, name: str, version: int, sequence: int = 0) -> None:
    await ingest.report(replica(name, None, sequence, state="syncing", target=version))


class TestLease:
    async def test_a_second_replica_gets_the_result_once_it_is_published(self, ingest: Ingest) -> None:
        await loads(ingest, "a", 0)
        await loads(ingest, "b", 0)
        assert await ingest.kv.request_lease(0, "a") == lease("a")
        second = asyncio.create_task(ingest.kv.request_lease(0, "b"))
        await settle()
        assert not second.done()
        result = await ingest.kv.publish_result(0, "a", RANKS)
        assert result.scales == SCALES
        assert await asyncio.wait_for(second, LONG_S) == result

    @pytest.mark.parametrize("how", ["it ends", "it fails", "it stays at the old version"])
    async def test_a_second_replica_gets_it_once_the_holder_has_gone(self, ingest: Ingest, how: str) -> None:
        await loads(ingest, "a", 0)
        await loads(ingest, "b", 0)
        await ingest.kv.request_lease(0, "a")
        second, third = (asyncio.create_task(ingest.kv.request_lease(0, name)) for name in ("b", "c"))
        await settle()
        assert not second.done() and not third.done()
        if how == "it ends":
            await ingest.goodbye("a")
        else:
            state = "failed" if how == "it fails" else "stale"
            await ingest.report(replica("a", None, 1, state=state, target=None))
        assert await asyncio.wait_for(second, LONG_S) == lease("b")
        await settle()
        assert not third.done()
        third.cancel()

    @pytest.mark.parametrize("times", [{"poll_s": 0.01}], indirect=True, ids=["polls end soon"])
    async def test_a_replica_that_waited_for_a_poll_is_told_to_ask_again(self, ingest: Ingest) -> None:
        await loads(ingest, "a", 0)
        await ingest.kv.request_lease(0, "a")
        for _ in range(2):
            with pytest.raises(NotReady, match="another replica still measures the KV scales of version 0"):
                await ingest.kv.request_lease(0, "b")

    @pytest.mark.parametrize("times", [{"poll_s": 0.05, "dead_after_s": 0.15}], indirect=True, ids=["dead soon"])
    async def test_a_holder_that_died_silently_is_not_waited_for_for_ever(self, ingest: Ingest) -> None:
        await loads(ingest, "a", 0)
        await ingest.kv.request_lease(0, "a")
        async with asyncio.timeout(LONG_S):
            while True:
                with suppress(NotReady):
                    assert await ingest.kv.request_lease(0, "b") == lease("b")
                    break

    async def test_a_replica_that_gives_up_waiting_does_not_get_it(self, ingest: Ingest) -> None:
        await loads(ingest, "a", 0)
        await ingest.kv.request_lease(0, "a")
        given_up = asyncio.create_task(ingest.kv.request_lease(0, "b"))
        await settle()
        given_up.cancel()
        await settle()
        await ingest.goodbye("a")
        assert await asyncio.wait_for(ingest.kv.request_lease(0, "c"), LONG_S) == lease("c")


class TestPublish:
    async def test_replicas_that_measured_side_by_side_get_the_same_scales(self, ingest: Ingest) -> None:
        others = (measured((1, 1, 1)),)
        measurements = (ingest.kv.publish_result(0, "a", RANKS), ingest.kv.publish_result(0, "b", others))
        first, second = await asyncio.gather(*measurements)
        assert first == second and first.scales == SCALES

    async def test_a_result_is_kept_although_its_replica_dies_meanwhile(self, ingest: Ingest, log: WeightLog) -> None:
        publishing = asyncio.create_task(ingest.kv.publish_result(0, "a", RANKS))
        await asyncio.sleep(0)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        kept = await ingest.kv.publish_result(0, "b", (measured((1, 1, 1)),))
        assert kept.scales == SCALES and await ingest.kv.request_lease(0, "b") == kept
        assert (log.folder(0) / KV_SCALES_FILE).is_file()

    @pytest.mark.parametrize(
        ("code", "instead"),
        [(errno.ENOSPC, "make room there"), (errno.EIO, "it is tried again until the disk takes it")],
    )
    async def test_scales_that_the_disk_refuses_are_not_given_to_anyone(
        self, code: int, instead: str, ingest: Ingest, log: WeightLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(code, "the disk says so")

        with monkeypatch.context() as patch:
            patch.setattr(coordinator, "write_result", refuse)
            expected = rf"^the KV scales of version 0 .* {log.root}: .*the disk says so: {instead}$"
            with pytest.raises(InsufficientStorage, match=expected):
                await ingest.kv.publish_result(0, "a", RANKS)
        assert await ingest.kv.request_lease(0, "b") == lease("b")
        assert (await ingest.kv.publish_result(0, "b", RANKS)).replica_id == "b"

    async def test_the_scales_of_a_version_that_was_dropped_are_not_taken(
        self, ingest: Ingest, trainer: Trainer, weights: Weights
    ) -> None:
        for version in (1, 2):
            await trainer.push(version, weights)
        with pytest.raises(NotFound, match="version 0 is not in the log any more"):
            await ingest.kv.publish_result(0, "a", RANKS)


class TestStatus:
    async def test_the_digest_stays_when_scales_are_measured(
        self, ingest: Ingest, trainer: Trainer, weights: Weights, log: WeightLog
    ) -> None:
        awaiting = await trainer.push(1, changed(weights, 1.0))
        assert awaiting.kv_scales_from == "calibrate" and awaiting.digest == log.manifest(1).digest
        assert await ingest.status(1) == awaiting
        await ingest.kv.publish_result(1, "a", RANKS)
        status = await ingest.status(1)
        assert (status.kv_scales_from, status.digest) == ("calibrate", awaiting.digest)
        await ingest.kv.publish_result(1, "b", (measured((1, 1, 1)),))
        assert await ingest.status(1) == status
        sent = await trainer.push(2, changed(weights, 1.0), SCALES)
        assert sent.digest == log.manifest(1).replace(kv_scales=SCALES).digest != status.digest

    async def test_after_a_failed_measurement_scales_are_those_of_unit(self, ingest: Ingest) -> None:
        awaiting = await ingest.status(0)
        await ingest.kv.publish_result(0, "a", (measured((0, 0, 0)),))
        status = await ingest.status(0)
        assert (status.kv_scales_from, status.digest) == ("unit", awaiting.digest)

    async def test_it_is_the_same_for_every_version_after_a_restart(
        self, ingest: Ingest, config: ServiceConfig, trainer: Trainer, weights: Weights
    ) -> None:
        first = await ingest.kv.publish_result(0, "a", RANKS)
        await trainer.push(1, changed(weights, 1.0))
        second = await ingest.kv.publish_result(1, "a", (measured((448, 448, 448)),))
        before = await ingest.versions()
        await ingest.stop()
        again = Ingest(config)
        await again.start()
        assert await again.versions() == before and len({status.digest for status in before}) == 2
        assert (await again.kv.request_lease(0, "b"), await again.kv.request_lease(1, "b")) == (first, second)
        await again.stop()

    async def test_an_ingest_does_not_start_on_scales_that_are_torn(
        self, ingest: Ingest, config: ServiceConfig, log: WeightLog
    ) -> None:
        await ingest.kv.publish_result(0, "a", RANKS)
        await ingest.stop()
        path = log.folder(0) / KV_SCALES_FILE
        path.write_text(path.read_text()[:50])
        with pytest.raises(LogCorrupt, match=str(path)):
            await Ingest(config).start()


class TestCacheDtype:
    async def test_the_first_choice_holds_for_all_and_over_a_restart(
        self, ingest: Ingest, config: ServiceConfig
    ) -> None:
        assert ingest.kv.kv_cache_choice() is None
        answers = await asyncio.gather(ingest.kv.choose_kv_cache(FP8), ingest.kv.choose_kv_cache(BF16))
        assert answers == [FP8, FP8] and ingest.kv.kv_cache_choice() == FP8
        await ingest.stop()
        again = Ingest(config)
        await again.start()
        assert again.kv.kv_cache_choice() == FP8 and await again.kv.choose_kv_cache(BF16) == FP8
        await again.stop()

    async def test_fp8_asked_for_by_name_takes_the_place_of_bf16(self, config: ServiceConfig, log: WeightLog) -> None:
        by_name = config.kv_cache.model_copy(update={"dtype": "fp8_e4m3"})
        ingest = Ingest(config.model_copy(update={"kv_cache": by_name}))
        await ingest.start()
        log.set_kv_cache(BF16)
        assert await ingest.kv.choose_kv_cache(FP8) == FP8 and log.kv_cache() == FP8
        await ingest.stop()

    async def test_a_choice_that_the_disk_refuses_holds_for_nobody(
        self, ingest: Ingest, log: WeightLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(WeightLog, "set_kv_cache", full)
            with pytest.raises(InsufficientStorage, match="choice of the KV cache's dtype cannot be kept"):
                await ingest.kv.choose_kv_cache(FP8)
        assert ingest.kv.kv_cache_choice() is None and await ingest.kv.choose_kv_cache(FP8) == FP8


class TestOtherWeights:
    async def test_their_replica_neither_gets_nor_publishes_scales(self, ingest: Ingest) -> None:
        digest = (await ingest.status(0)).digest
        await loads(ingest, "old", 0)
        with pytest.raises(NotReady, match=f"version 0 is {digest} in the ingest's log, and not 00ff: look again"):
            await ingest.kv.request_lease(0, "old", "00ff")
        with pytest.raises(NotFound, match="and not 00ff"):
            await ingest.kv.publish_result(0, "old", RANKS, "00ff")
        await loads(ingest, "new", 0)
        assert await ingest.kv.request_lease(0, "new", digest) == lease("new")
        assert (await ingest.kv.publish_result(0, "new", RANKS, digest)).scales == SCALES

    @pytest.mark.parametrize(("dtype", "awaits"), [("auto", False), ("fp8_e4m3", True)])
    async def test_versions_await_no_scales_once_auto_came_to_bf16(
        self, config: ServiceConfig, weights: Weights, log: WeightLog, dtype: str, awaits: bool
    ) -> None:
        kv_cache = config.kv_cache.model_copy(update={"dtype": dtype})
        config = config.model_copy(update={"kv_cache": kv_cache})
        for version in (1, 2):
            ingest = Ingest(config)
            await ingest.start()
            await ingest.kv.choose_kv_cache(BF16)
            await Trainer(ingest).push(version, changed(weights, float(version)))
            await ingest.stop()
            assert log.manifest(version).awaits_kv_scales == awaits
