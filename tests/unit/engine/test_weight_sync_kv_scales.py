"""KV scales on a version's way into an engine: fetched before it closes, measured before it serves."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout_service.config import WeightsConfig
from rollout_service.engine.weight_sync import WeightSync
from rollout_service.errors import EngineFailed, KVCacheUnfit, NotFound, NotReady
from rollout_service.protocol.fleet import KVCacheChoice, KVCacheStatus
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest
from tests.unit.engine.fakes import LONG_S, FakeEngine, FakeIngest, Gate, push, serving
from tests.unit.store.versions import commit

SCALES, PUBLISHED = {"l.0.k_scale": 2.0}, {"l.0.k_scale": 4.0}
WAITS = NotReady("the ingest does not answer")
UNPUBLISHED = NotReady("the measured KV scales are not stored yet: the ingest died")


class FakeKVScales:
    """Keeps its place in the order of what is done to the engine."""

    def __init__(self, engine: FakeEngine) -> None:
        self.status: KVCacheStatus | None = None
        self.error: str | None = None
        self.scales: dict[str, float] | None = SCALES
        self.fail_scales: Exception | None = None
        """Raised instead of scales while it is set."""
        self.fail_loaded: dict[int, Exception] = {}
        """Version → what measuring it raises. After NotReady ``scales_for`` raises the same until a test ends that."""
        self.measuring = Gate()
        self._engine = engine

    async def scales_for(self, manifest: Manifest) -> dict[str, float] | None:
        if self.fail_scales is not None:
            raise self.fail_scales
        self._engine.calls.append(f"scales of {manifest.version}")
        return self.scales

    async def loaded(self, manifest: Manifest) -> dict[str, float]:
        await self.measuring.passed()
        self._engine.calls.append(f"measure {manifest.version}")
        if manifest.version in self.fail_loaded:
            error = self.fail_loaded[manifest.version]
            if isinstance(error, NotReady):
                self.fail_scales = error
            raise error
        choice = KVCacheChoice(dtype="fp8_e4m3", why="measured")
        self.status = KVCacheStatus(choice=choice, measured_version=manifest.version)
        return PUBLISHED

    def publish(self) -> None:
        """Have what was measured published."""
        self.fail_scales, self.fail_loaded = None, {}


@pytest.fixture
def kv_scales(engine: FakeEngine) -> FakeKVScales:
    return FakeKVScales(engine)


@pytest.fixture
async def new(
    log: WeightLog, engine: FakeEngine, ingest: FakeIngest, kv_scales: FakeKVScales
) -> AsyncIterator[WeightSync]:
    """Not started yet."""
    config = WeightsConfig(root=log.root, poll_s=0.01)
    weight_sync = WeightSync("r1", engine, ingest, config, "model", kv_scales=kv_scales)
    yield weight_sync
    weight_sync.stop()


@pytest.fixture
async def weight_sync(new: WeightSync, engine: FakeEngine) -> WeightSync:
    await new.start()
    engine.calls.clear()
    return new


def count_stagings(engine: FakeEngine) -> list[Path]:
    """Every folder that is staged from now on."""
    staged: list[Path] = []
    stage = engine.stage

    async def counted(folder: Path, digest: str | None = None) -> None:
        staged.append(folder)
        await stage(folder, digest)

    engine.stage = counted
    return staged


def in_order(version: int) -> list[str]:
    return [
        f"scales of {version}",
        "pause keep",
        f"load {version} with {SCALES}",
        f"measure {version}",
        "resume",
    ]


async def test_a_version_is_measured_before_the_engine_resumes(weight_sync, log, engine, ingest):
    await push(log, ingest, 1)
    await serving(weight_sync, ingest, 1)
    assert engine.calls == in_order(1)


async def test_so_is_the_first_version_before_the_replica_is_ready(new, engine):
    assert new.status().kv_cache is None
    await new.start()
    assert engine.calls == in_order(0)
    status = new.status()
    assert status.kv_cache is not None and status.kv_cache.measured_version == 0


async def test_while_it_measures_it_is_closed_and_syncing(weight_sync, log, engine, ingest, kv_scales):
    kv_scales.measuring.close()
    kv_scales.measuring.reached.clear()
    await push(log, ingest, 1)
    await asyncio.wait_for(kv_scales.measuring.reached.wait(), LONG_S)
    await ingest.reported(lambda s: (s.version, s.state, s.target) == (0, "syncing", 1))
    assert engine.paused and not await weight_sync.wait_version(1, timeout_s=0.01)
    kv_scales.measuring.open()
    await serving(weight_sync, ingest, 1)
    assert not engine.paused


async def test_in_a_paused_fleet_it_measures_and_stays_paused(weight_sync, log, engine, ingest):
    await ingest.change(paused=True)
    await ingest.reported(lambda s: s.paused)
    engine.calls.clear()
    await push(log, ingest, 1)
    await serving(weight_sync, ingest, 1)
    assert engine.calls == in_order(1)[:-1] and engine.paused


class TestIngestAway:
    async def test_without_the_ingest_the_old_version_is_served(self, weight_sync, log, engine, ingest, kv_scales):
        kv_scales.fail_scales = WAITS
        await push(log, ingest, 1)
        status = await ingest.reported(lambda s: s.error is not None)
        assert (status.version, status.state, status.target, status.error) == (0, "syncing", 1, str(WAITS))
        assert engine.calls == [] and not engine.paused
        weight_sync.check_health()
        kv_scales.fail_scales = None
        await serving(weight_sync, ingest, 1)
        assert engine.calls == in_order(1) and weight_sync.status().error is None

    async def test_however_long_it_is_away_the_version_is_read_once(self, weight_sync, log, engine, ingest, kv_scales):
        staged = count_stagings(engine)
        kv_scales.fail_scales = WAITS
        await push(log, ingest, 1)
        seen = len(ingest.reports)
        await ingest.reported(lambda _: len(ingest.reports) > seen + 20)
        kv_scales.fail_scales = None
        await serving(weight_sync, ingest, 1)
        assert [folder.name for folder in staged] == ["1"]

    async def test_a_replica_that_starts_meanwhile_waits_and_is_not_ready(self, new, engine, ingest, kv_scales):
        kv_scales.fail_scales = WAITS
        starting = asyncio.create_task(new.start())
        await ingest.reported(lambda s: s.target == 0)
        await ingest.reported(lambda _: len(ingest.reports) >= 3)
        assert not starting.done() and new.status().state == "syncing" and engine.calls == []
        kv_scales.fail_scales = None
        await asyncio.wait_for(starting, LONG_S)
        assert engine.calls == in_order(0)


class TestNotPublished:
    async def test_without_the_ingest_it_serves_the_old_version_again(
        self, weight_sync, log, engine, ingest, kv_scales
    ):
        kv_scales.fail_loaded[1] = UNPUBLISHED
        await push(log, ingest, 1)
        status = await ingest.reported(lambda s: s.error is not None)
        assert (status.version, status.state, status.target, status.error) == (0, "syncing", 1, str(UNPUBLISHED))
        assert engine.calls == [*in_order(1)[:-1], f"load 0 with {PUBLISHED}", "resume"] and not engine.paused
        seen = len(ingest.reports)
        await ingest.reported(lambda _: len(ingest.reports) > seen + 20)
        assert engine.calls[-1] == "resume" and engine.staged == [0, 1, 0, 1]
        engine.calls.clear()
        kv_scales.publish()
        await serving(weight_sync, ingest, 1)
        assert engine.calls == in_order(1) and weight_sync.status().error is None

    async def test_with_no_old_version_it_starts_once_they_are_published(self, new, engine, ingest, kv_scales):
        kv_scales.fail_loaded[0] = UNPUBLISHED
        starting = asyncio.create_task(new.start())
        await ingest.reported(lambda _: len(ingest.reports) >= 5)
        assert not starting.done() and engine.calls == in_order(0)[:-1] and engine.paused
        kv_scales.publish()
        await asyncio.wait_for(starting, LONG_S)
        assert engine.calls == in_order(0)[:-1] + in_order(0) and new.version == 0

    async def test_with_the_old_version_gone_it_waits_closed(self, weight_sync, log, engine, ingest, kv_scales):
        kv_scales.fail_loaded[1] = UNPUBLISHED
        kv_scales.measuring.close()
        kv_scales.measuring.reached.clear()
        await push(log, ingest, 1)
        await asyncio.wait_for(kv_scales.measuring.reached.wait(), LONG_S)
        log.drop(0)
        kv_scales.measuring.open()
        await ingest.reported(lambda s: s.error == str(UNPUBLISHED))
        assert engine.calls == in_order(1)[:-1] and engine.paused
        kv_scales.publish()
        await serving(weight_sync, ingest, 1)
        assert engine.calls == in_order(1)[:-1] + in_order(1)

    @pytest.mark.parametrize("waits", [WAITS, UNPUBLISHED], ids=["not asked", "measured here"])
    async def test_a_replica_that_starts_is_no_failure_for_it(self, weight_sync, log, ingest, kv_scales, waits):
        if waits is WAITS:
            kv_scales.fail_scales = waits
        else:
            kv_scales.fail_loaded[1] = waits
        await push(log, ingest, 1)
        catching_up = asyncio.create_task(weight_sync.caught_up())
        await ingest.reported(lambda s: s.error is not None)
        seen = len(ingest.reports)
        await ingest.reported(lambda _: len(ingest.reports) > seen + 20)
        assert not catching_up.done()
        kv_scales.publish()
        await asyncio.wait_for(catching_up, LONG_S)
        assert weight_sync.version == 1


class TestNotMeasurable:
    async def test_a_version_removed_while_measured_gives_way_to_a_newer(
        self, weight_sync, log, engine, ingest, kv_scales
    ):
        kv_scales.fail_loaded[1] = NotFound("version 1 is not in the log any more")
        kv_scales.measuring.close()
        kv_scales.measuring.reached.clear()
        await push(log, ingest, 1)
        await asyncio.wait_for(kv_scales.measuring.reached.wait(), LONG_S)
        commit(log, 2)
        kv_scales.measuring.open()
        await ingest.change(version=2)
        await serving(weight_sync, ingest, 2)
        assert engine.calls == in_order(1)[:-1] + in_order(2)

    async def test_an_engine_that_cannot_measure_never_serves_the_version(
        self, weight_sync, log, engine, ingest, kv_scales
    ):
        kv_scales.fail_loaded[1] = EngineFailed("keys and values could not be measured")
        await push(log, ingest, 1)
        async with asyncio.timeout(LONG_S):
            while not weight_sync._tasks[1].done():
                await asyncio.sleep(0.001)
        with pytest.raises(EngineFailed, match="r1 stopped following the log: keys and values could not be measured"):
            weight_sync.check_health()
        assert engine.calls == in_order(1)[:-1] and engine.paused and weight_sync.version == 0

    async def test_a_model_that_is_unfit_for_fp8_does_not_start(self, new, engine, kv_scales):
        kv_scales.fail_loaded[0] = KVCacheUnfit("FP8 is not accurate enough for 2 of 2 layers")
        with pytest.raises(KVCacheUnfit, match="for 2 of 2 layers"):
            await new.start()
        assert "resume" not in engine.calls and new.version is None
