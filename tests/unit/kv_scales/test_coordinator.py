"""Replicas turn to the ingest: for turns, for scales that hold, and for what the cache is kept in."""

import asyncio
import errno
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.errors import InsufficientStorage, LogCorrupt, NotFound, NotReady
from rollout_service.ingest.ingest import Ingest
from rollout_service.kv_scales import calibration
from rollout_service.kv_scales.calibration import CalibrationLease
from rollout_service.kv_scales.result import SETTLED_FILE
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.store.log import WeightLog
from tests.unit.ingest.trainer import Trainer, Weights, changed, config_of, replica, settle
from tests.unit.kv_scales.measured import measured, scales_of

LONG_S = 60.0
RANKS = (measured((448, 896, 224)),)
SCALES = scales_of(1, 2, 0.5)
"""Of ``RANKS``, with a margin of 1."""
FIRST_TURN = CalibrationLease(scales=None, measures=True)
FP8 = KVCacheChoice(dtype="fp8_e4m3", why="all layers bear it", judged_by="a, version 0")
BF16 = KVCacheChoice(dtype="bfloat16", why="2 layers do not", judged_by="b, version 0")


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


# --- turns


async def test_a_second_replica_waits_and_gets_the_scales_as_soon_as_the_first_has_measured(ingest: Ingest) -> None:
    await loads(ingest, "a", 0)
    await loads(ingest, "b", 0)
    assert await ingest.kv.turn(0, "a") == FIRST_TURN
    second = asyncio.create_task(ingest.kv.turn(0, "b"))
    await settle()
    assert not second.done()
    settled = await ingest.kv.settle(0, "a", RANKS)
    assert settled.scales == SCALES
    assert await asyncio.wait_for(second, LONG_S) == CalibrationLease(scales=SCALES, measures=False)


@pytest.mark.parametrize("how", ["it ends", "it fails", "it stays at the old version"])
async def test_a_second_replica_measures_as_soon_as_the_first_is_not_on_its_way_any_more(
    ingest: Ingest, how: str
) -> None:
    await loads(ingest, "a", 0)
    await loads(ingest, "b", 0)
    await ingest.kv.turn(0, "a")
    second, third = (asyncio.create_task(ingest.kv.turn(0, name)) for name in ("b", "c"))
    await settle()
    assert not second.done() and not third.done()
    if how == "it ends":
        await ingest.goodbye("a")
    else:
        state = "failed" if how == "it fails" else "stale"
        await ingest.report(replica("a", None, 1, state=state, target=None))
    assert await asyncio.wait_for(second, LONG_S) == FIRST_TURN
    await settle()
    assert not third.done()
    third.cancel()


@pytest.mark.parametrize("times", [{"poll_s": 0.01}], indirect=True, ids=["polls end soon"])
async def test_a_replica_that_waited_for_a_poll_is_told_to_ask_again(ingest: Ingest) -> None:
    await loads(ingest, "a", 0)
    await ingest.kv.turn(0, "a")
    for _ in range(2):
        with pytest.raises(NotReady, match="another replica still measures the KV scales of version 0"):
            await ingest.kv.turn(0, "b")


@pytest.mark.parametrize("times", [{"poll_s": 0.05, "dead_after_s": 0.15}], indirect=True, ids=["dead soon"])
async def test_a_replica_that_died_without_a_word_is_not_waited_for_for_ever(ingest: Ingest) -> None:
    await loads(ingest, "a", 0)
    await ingest.kv.turn(0, "a")
    async with asyncio.timeout(LONG_S):
        while True:
            with suppress(NotReady):
                assert await ingest.kv.turn(0, "b") == FIRST_TURN
                break


async def test_a_replica_that_gives_up_waiting_is_not_given_the_turn(ingest: Ingest) -> None:
    await loads(ingest, "a", 0)
    await ingest.kv.turn(0, "a")
    given_up = asyncio.create_task(ingest.kv.turn(0, "b"))
    await settle()
    given_up.cancel()
    await settle()
    await ingest.goodbye("a")
    assert await asyncio.wait_for(ingest.kv.turn(0, "c"), LONG_S) == FIRST_TURN


# --- settling


async def test_replicas_that_measured_side_by_side_get_the_same_scales(ingest: Ingest) -> None:
    others = (measured((1, 1, 1)),)
    first, second = await asyncio.gather(ingest.kv.settle(0, "a", RANKS), ingest.kv.settle(0, "b", others))
    assert first == second and first.scales == SCALES


async def test_what_a_replica_measured_is_kept_although_it_dies_before_it_is_answered(
    ingest: Ingest, log: WeightLog
) -> None:
    settling = asyncio.create_task(ingest.kv.settle(0, "a", RANKS))
    await asyncio.sleep(0)
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    await ingest.kv.settle(0, "b", (measured((1, 1, 1)),))
    assert await ingest.kv.turn(0, "b") == CalibrationLease(scales=SCALES, measures=False)
    assert (log.folder(0) / SETTLED_FILE).is_file()


@pytest.mark.parametrize(
    ("code", "instead"), [(errno.ENOSPC, "make room there"), (errno.EIO, "it is tried again until the disk takes it")]
)
async def test_scales_that_the_disk_refuses_are_not_given_to_anyone(
    code: int, instead: str, ingest: Ingest, log: WeightLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, "the disk says so")

    with monkeypatch.context() as patch:
        patch.setattr(calibration, "write_result", refuse)
        expected = rf"^the KV scales of version 0 .* {log.root}: .*the disk says so: {instead}$"
        with pytest.raises(InsufficientStorage, match=expected):
            await ingest.kv.settle(0, "a", RANKS)
    assert await ingest.kv.turn(0, "b") == FIRST_TURN
    assert (await ingest.kv.settle(0, "b", RANKS)).replica_id == "b"


async def test_the_scales_of_a_version_that_was_dropped_are_not_taken(
    ingest: Ingest, trainer: Trainer, weights: Weights
) -> None:
    for version in (1, 2):
        await trainer.push(version, weights)
    with pytest.raises(NotFound, match="version 0 is not in the log any more"):
        await ingest.kv.settle(0, "a", RANKS)


# --- what a version's status says


async def test_the_digest_of_a_version_changes_once_to_one_that_covers_its_scales(
    ingest: Ingest, trainer: Trainer, weights: Weights, log: WeightLog
) -> None:
    awaiting = await trainer.push(1, changed(weights, 1.0))
    assert awaiting.kv_scales_from == "calibrate" and awaiting.digest == log.manifest(1).digest
    assert await ingest.status(1) == awaiting
    await ingest.kv.settle(1, "a", RANKS)
    status = await ingest.status(1)
    scaled = log.manifest(1).model_copy(update={"kv_scales": SCALES})
    assert (status.kv_scales_from, status.digest) == ("calibrate", scaled.digest)
    assert status.digest != awaiting.digest
    await ingest.kv.settle(1, "b", (measured((1, 1, 1)),))
    assert await ingest.status(1) == status
    sent = await trainer.push(2, changed(weights, 1.0), SCALES)
    assert (sent.digest, sent.kv_scales_from) == (status.digest, "trainer")


async def test_a_version_whose_first_measurement_failed_has_the_digest_of_one_with_unit_scales(
    ingest: Ingest, log: WeightLog
) -> None:
    awaiting = await ingest.status(0)
    await ingest.kv.settle(0, "a", (measured((0, 0, 0)),))
    status, unit = await ingest.status(0), log.manifest(0).model_copy(update={"kv_scales_from": "unit"})
    assert (status.kv_scales_from, status.digest) == ("unit", unit.digest) and status.digest != awaiting.digest


async def test_an_ingest_that_starts_again_says_the_same_of_every_version(
    ingest: Ingest, config: ServiceConfig, trainer: Trainer, weights: Weights
) -> None:
    await ingest.kv.settle(0, "a", RANKS)
    await trainer.push(1, changed(weights, 1.0))
    await ingest.kv.settle(1, "a", (measured((448, 448, 448)),))
    before = await ingest.versions()
    await ingest.stop()
    again = Ingest(config)
    await again.start()
    assert await again.versions() == before and len({status.digest for status in before}) == 2
    assert await again.kv.turn(0, "b") == CalibrationLease(scales=SCALES, measures=False)
    assert await again.kv.turn(1, "b") == CalibrationLease(scales=scales_of(1, 1, 1), measures=False)
    await again.stop()


async def test_an_ingest_does_not_start_on_scales_that_are_torn(
    ingest: Ingest, config: ServiceConfig, log: WeightLog
) -> None:
    await ingest.kv.settle(0, "a", RANKS)
    await ingest.stop()
    path = log.folder(0) / SETTLED_FILE
    path.write_text(path.read_text()[:50])
    with pytest.raises(LogCorrupt, match=str(path)):
        await Ingest(config).start()


# --- the cache's dtype


async def test_the_first_choice_holds_for_all_and_for_an_ingest_that_starts_again(
    ingest: Ingest, config: ServiceConfig
) -> None:
    assert ingest.kv.choice() is None
    answers = await asyncio.gather(ingest.kv.choose(FP8), ingest.kv.choose(BF16))
    assert answers == [FP8, FP8] and ingest.kv.choice() == FP8
    await ingest.stop()
    again = Ingest(config)
    await again.start()
    assert again.kv.choice() == FP8 and await again.kv.choose(BF16) == FP8
    await again.stop()


async def test_that_fp8_does_takes_the_place_of_an_earlier_bf16_where_fp8_is_asked_for_by_name(
    config: ServiceConfig, log: WeightLog
) -> None:
    by_name = config.kv_cache.model_copy(update={"dtype": "fp8_e4m3"})
    ingest = Ingest(config.model_copy(update={"kv_cache": by_name}))
    await ingest.start()
    log.set_kv_cache(BF16)
    assert await ingest.kv.choose(FP8) == FP8 and log.kv_cache() == FP8
    await ingest.stop()


async def test_a_choice_that_the_disk_refuses_holds_for_nobody(
    ingest: Ingest, log: WeightLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(WeightLog, "set_kv_cache", full)
        with pytest.raises(InsufficientStorage, match="choice of the KV cache's dtype cannot be kept"):
            await ingest.kv.choose(FP8)
    assert ingest.kv.choice() is None and await ingest.kv.choose(FP8) == FP8


# --- other weights under the same number


async def test_a_replica_with_other_weights_of_that_number_neither_gets_nor_settles_its_scales(ingest: Ingest) -> None:
    digest = (await ingest.status(0)).digest
    await loads(ingest, "old", 0)
    with pytest.raises(NotReady, match=f"version 0 is {digest} in the ingest's log, and not 00ff: look again"):
        await ingest.kv.turn(0, "old", "00ff")
    with pytest.raises(NotFound, match="and not 00ff"):
        await ingest.kv.settle(0, "old", RANKS, "00ff")
    await loads(ingest, "new", 0)
    assert await ingest.kv.turn(0, "new", digest) == FIRST_TURN
    assert (await ingest.kv.settle(0, "new", RANKS, digest)).scales == SCALES


@pytest.mark.parametrize(("dtype", "awaits"), [("auto", False), ("fp8_e4m3", True)])
async def test_versions_await_no_scales_once_the_cache_fell_back_to_bf16_in_an_ingest_that_starts_again_too(
    config: ServiceConfig, weights: Weights, log: WeightLog, dtype: str, awaits: bool
) -> None:
    kv_cache = config.kv_cache.model_copy(update={"dtype": dtype})
    config = config.model_copy(update={"kv_cache": kv_cache})
    for version in (1, 2):
        ingest = Ingest(config)
        await ingest.start()
        await ingest.kv.choose(BF16)
        await Trainer(ingest).push(version, changed(weights, float(version)))
        await ingest.stop()
        assert log.manifest(version).awaits_kv_scales == awaits
