"""A replica measures on its turn, or to find out whether FP8 does at all, and says what it found."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rollout_service.config.engine import KVCalibrationConfig
from rollout_service.errors import EngineFailed, InsufficientStorage, KVCacheUnfit, LogCorrupt, NotFound, NotReady
from rollout_service.kv_scales.batch import CalibrationBatch
from rollout_service.kv_scales.calibrator import KVCalibrator, NoKVScales
from rollout_service.protocol.fleet import KVCacheChoice, KVCacheStatus
from rollout_service.store.manifest import Manifest, Recipe
from tests.unit.engine.measuring import LAYERS, FakeCoordinator, FakeMeasuringEngine, all_scales, loud, ordinary, uneven

KNOWN = KVCacheChoice(dtype="fp8_e4m3", why="found before", judged_by="r0, version 0")
OTHERS, FOURS = all_scales(0.5, 0.5, 0.5), all_scales(1 / 64, 16, 1 / 64)
"""Scales of a version before, and what suits keys up to 4096."""
Make = Callable[..., KVCalibrator]


def version(number: int, **scales: Any) -> Manifest:
    """One that awaits its scales, unless they are given."""
    kv_scales = scales or {"kv_scales_from": "calibrate"}
    return Manifest(version=number, fingerprint="model", recipe=Recipe(weights="none"), tensors=(), **kv_scales)


AWAITING, BRINGS = version(1), version(1, kv_scales=OTHERS, kv_scales_from="trainer")


@pytest.fixture
def engine() -> FakeMeasuringEngine:
    return FakeMeasuringEngine()


@pytest.fixture
def desk() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def batch() -> CalibrationBatch:
    return CalibrationBatch(KVCalibrationConfig(max_sequences=2), vocab_size=100, max_model_len=8)


@pytest.fixture
def make(engine: FakeMeasuringEngine, desk: FakeCoordinator, batch: CalibrationBatch) -> Make:
    return lambda choice=KNOWN: KVCalibrator("r1", engine, desk, batch, choice, retry_s=0.001)


async def load(calibrator: KVCalibrator, engine: FakeMeasuringEngine, manifest: Manifest) -> None:
    """As ``WeightSync`` does it."""
    found = await calibrator.scales_for(manifest)
    engine.scales = found or manifest.kv_scales
    await calibrator.loaded(manifest)


# --- whether it measures


async def test_a_version_that_brings_its_scales_is_neither_asked_for_nor_measured(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    calibrator = make()
    assert await calibrator.scales_for(BRINGS) is None
    await calibrator.loaded(BRINGS)
    assert engine.calls == [] and desk.asked == []
    assert calibrator.status == KVCacheStatus(choice=KNOWN)


async def test_scales_that_another_replica_measured_are_loaded_and_nothing_is_measured(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    desk.gives(OTHERS, measures=False)
    calibrator = make()
    assert await calibrator.scales_for(AWAITING) == OTHERS
    await calibrator.loaded(AWAITING)
    assert engine.calls == [] and desk.asked == [("kv_turn", 1, "r1", AWAITING.digest)]
    assert calibrator.status is not None and calibrator.status.measured_version is None


async def test_on_its_turn_it_measures_and_publishes_what_every_rank_saw(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator, batch: CalibrationBatch
) -> None:
    engine.keys = {layer: [ordinary(), loud()] for layer in LAYERS}
    desk.gives(None, measures=True)
    desk.settles(1, FOURS)
    await load(make(), engine, AWAITING)
    [(_, asked_version, replica_id, ranks, digest)] = [asked for asked in desk.asked if asked[0] == "kv_settle"]
    assert (asked_version, replica_id, digest) == (1, "r1", AWAITING.digest)
    assert [rank.amax[LAYERS[0]] for rank in ranks] == [((4, 4, 4),), ((4, 4096, 4),)]
    assert engine.batches[0] == batch.sequences() and ranks[0].tokens == 16


async def test_settled_scales_that_differ_from_those_it_was_loaded_with_are_loaded_and_measured(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    engine.keys[LAYERS[0]] = [loud()]
    desk.gives(OTHERS, measures=True)
    desk.settles(1, FOURS)
    calibrator = make()
    await load(calibrator, engine, AWAITING)
    assert engine.calls == ["measure", "set", "measure"] and engine.scales == FOURS
    assert calibrator.status is not None and calibrator.status.saturated == dict.fromkeys(LAYERS, (0, 0))


@pytest.mark.parametrize(
    ("keys", "settled", "calls"),
    [
        (ordinary(), all_scales(0.01, 0.01, 0.01), ["measure", "set"]),
        (ordinary(), all_scales(0.01, 0.005, 0.01), ["measure", "set", "measure"]),
        (loud(), all_scales(10, 10, 10), ["measure", "set", "measure"]),
    ],
    ids=["all is within the new scales", "some keys are beyond them", "the old ones were unfit"],
)
async def test_with_new_scales_it_measures_again_only_where_the_first_time_does_not_say_what_they_cost(
    make: Make,
    engine: FakeMeasuringEngine,
    desk: FakeCoordinator,
    keys: torch.Tensor,
    settled: dict[str, float],
    calls: list[str],
) -> None:
    engine.keys = {layer: [keys] for layer in LAYERS}
    desk.gives(None, measures=True)
    desk.settles(1, settled)
    calibrator = make()
    await load(calibrator, engine, AWAITING)
    assert engine.calls == calls and engine.scales == settled
    [now] = await engine.measure_kv([[1, 2]])
    expected = {layer: (error.k_saturated, error.v_saturated) for layer, error in now.errors.items()}
    assert calibrator.status is not None and calibrator.status.saturated == expected


async def test_settled_scales_that_are_those_it_was_loaded_with_are_left_alone(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    engine.keys[LAYERS[0]] = [loud()]
    desk.gives(OTHERS, measures=True)
    desk.settles(1, dict(OTHERS))
    calibrator = make()
    await load(calibrator, engine, AWAITING)
    assert engine.calls == ["measure"] and engine.scales == OTHERS
    assert calibrator.status is not None and calibrator.status.saturated[LAYERS[0]] == (1, 0)


async def test_a_first_measurement_that_failed_leaves_the_scales_of_1(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    desk.gives(None, measures=True)
    desk.settles(1, None)
    await load(make(), engine, AWAITING)
    assert engine.calls == ["measure"] and engine.scales is None


async def test_its_turn_is_over_with_the_version(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    desk.gives(OTHERS, measures=True)
    calibrator = make()
    await calibrator.scales_for(AWAITING)  # and loading it fails, say
    await load(calibrator, engine, version(2, kv_scales=OTHERS, kv_scales_from="trainer"))
    assert engine.calls == [] and desk.names() == ["kv_turn"]


# --- whether FP8 does


@pytest.mark.parametrize("awaits", [True, False], ids=["measured by another", "brings its scales"])
async def test_while_nobody_has_chosen_it_measures_whatever_scales_the_version_has(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator, awaits: bool
) -> None:
    desk.gives(OTHERS, measures=False)
    calibrator = make(None)
    assert calibrator.status is None
    await load(calibrator, engine, AWAITING if awaits else BRINGS)
    assert engine.calls == ["measure", "judge"] and "kv_settle" not in desk.names()
    why = "all 2 layers bear it, measured on random tokens"
    choice = KVCacheChoice(dtype="fp8_e4m3", why=why, judged_by="r1, version 1")
    assert desk.asked[-1] == ("choose_kv_cache", choice)
    assert calibrator.status is not None and calibrator.status.choice == choice


async def test_it_is_judged_with_the_best_scales_there_are_and_not_with_those_it_has(
    make: Make, engine: FakeMeasuringEngine
) -> None:
    engine.keys[LAYERS[1]] = [loud()]
    calibrator = make(None)
    await load(calibrator, engine, version(1, kv_scales=None, kv_scales_from="unit"))
    status = calibrator.status
    assert status is not None and status.choice.dtype == "fp8_e4m3"
    assert list(status.unfit) == [LAYERS[1]] and "k_saturated 1 is above 0.001" in status.unfit[LAYERS[1]]
    assert status.saturated == {LAYERS[0]: (0, 0), LAYERS[1]: (1, 0)}


async def test_it_is_judged_by_the_rank_that_is_worst(make: Make, engine: FakeMeasuringEngine) -> None:
    engine.keys = {layer: [ordinary(), uneven(), ordinary()] for layer in LAYERS}
    with pytest.raises(KVCacheUnfit, match="2 of 2 layers"):
        await load(make(None), engine, BRINGS)


async def test_keys_that_no_scale_saves_are_refused_with_the_layers_and_the_reasons(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    engine.keys[LAYERS[1]] = [uneven()]
    desk.gives(None, measures=True)
    desk.settles(1, OTHERS)
    calibrator = make(None)
    words = rf"^1 of 2 layers do not bear an FP8 KV cache: {LAYERS[1]}: k_channel_relative 0\.\d+ is above 0\.25$"
    with pytest.raises(KVCacheUnfit, match=words) as refused:
        await load(calibrator, engine, AWAITING)
    assert list(refused.value.detail["layers"]) == [LAYERS[1]]
    assert refused.value.detail["judged_by"] == "r1, version 1"
    assert "choose_kv_cache" not in desk.names() and calibrator.status is None


async def test_once_it_has_chosen_it_does_not_choose_again(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    calibrator = make(None)
    await load(calibrator, engine, BRINGS)
    engine.keys[LAYERS[1]] = [uneven()]
    await load(calibrator, engine, BRINGS)
    assert engine.calls == ["measure", "judge"] and desk.names() == ["choose_kv_cache"]


async def test_a_model_that_later_does_not_bear_fp8_any_more_is_served_and_the_status_says_why(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    engine.keys[LAYERS[1]] = [uneven()]
    desk.gives(OTHERS, measures=True)
    desk.settles(1, OTHERS)
    calibrator = make(KNOWN)
    await load(calibrator, engine, AWAITING)
    assert calibrator.status is not None and list(calibrator.status.unfit) == [LAYERS[1]]
    assert calibrator.status.choice == KNOWN


async def test_keys_that_are_zero_do_not_tell_whether_fp8_does_and_that_is_what_is_noted(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    engine.keys[LAYERS[1]] = [ordinary() * 0]
    calibrator = make(None)
    await load(calibrator, engine, BRINGS)
    assert calibrator.status is not None and desk.asked == [("choose_kv_cache", calibrator.status.choice)]
    assert calibrator.status.choice.dtype == "fp8_e4m3"
    assert calibrator.status.choice.why.startswith("not measured: 1 tensors were zero throughout")


# --- an ingest that is away, and what fails


async def test_while_the_ingest_is_away_it_waits_and_then_goes_on(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    desk.gives(OTHERS, measures=True)
    disk_full = InsufficientStorage("the KV scales of version 1 cannot be kept")
    desk.answers["kv_settle"] = [ActorDiedError(), ActorUnavailableError("away", None), NotReady("not yet"), disk_full]
    desk.settles(1, FOURS)
    calibrator = make()
    await load(calibrator, engine, AWAITING)
    assert desk.names() == ["kv_turn"] + ["kv_settle"] * 5
    assert len({id(asked[3]) for asked in desk.asked[1:]}) == 1  # measured once
    assert engine.scales == FOURS and calibrator.error is None


async def test_while_its_scales_cannot_be_kept_it_says_why(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    desk.gives(OTHERS, measures=True)
    calibrator = make()
    desk.answers["kv_settle"] = [InsufficientStorage("make room")] * 100
    desk.settles(1, FOURS)
    loading = asyncio.create_task(load(calibrator, engine, AWAITING))
    while calibrator.error is None:
        await asyncio.sleep(0)
    assert calibrator.error == "the KV scales of version 1 are measured and wait: make room"
    await loading
    assert calibrator.error is None


async def test_it_does_not_serve_in_fp8_before_that_is_noted_for_all(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    desk.answers["choose_kv_cache"] = [ActorDiedError(), InsufficientStorage("make room")]
    calibrator = make(None)
    await load(calibrator, engine, BRINGS)
    assert desk.names() == ["choose_kv_cache"] * 3 and calibrator.error is None
    assert calibrator.status is not None and calibrator.status.choice.why.startswith("all 2 layers bear it")
    await load(calibrator, engine, BRINGS)
    assert desk.names() == ["choose_kv_cache"] * 3


@pytest.mark.parametrize("measured", [True, False], ids=["it found FP8 to do", "it could not measure"])
async def test_a_replica_that_finds_fp8_to_do_gives_way_to_one_that_found_otherwise_before(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator, measured: bool
) -> None:
    held = KVCacheChoice(dtype="bfloat16", why="1 of 2 layers do not bear it", judged_by="r0, version 0")
    desk.answers["choose_kv_cache"] = [held]
    engine.fail = None if measured else "its attention has attention sinks"
    calibrator = make(None)
    with pytest.raises(KVCacheUnfit, match="1 of 2 layers do not bear it") as refused:
        await load(calibrator, engine, BRINGS)
    assert refused.value.detail["judged_by"] == "r0, version 0" and calibrator.status is None


async def test_waiting_for_another_replica_is_left_to_the_follower(make: Make, desk: FakeCoordinator) -> None:
    desk.answers["kv_turn"] = [NotReady("another replica still measures the KV scales of version 1")]
    with pytest.raises(NotReady, match="another replica still measures"):
        await make().scales_for(AWAITING)


async def test_a_version_that_was_removed_meanwhile_is_not_found(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    desk.gives(None, measures=True)
    desk.answers["kv_settle"] = [NotFound("version 1 is not in the log any more", {"version": 1})]
    with pytest.raises(NotFound, match="version 1 is not in the log any more"):
        await load(make(), engine, AWAITING)
    assert engine.calls == ["measure"]


async def test_any_other_answer_to_a_measurement_fails_the_engine(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    desk.gives(None, measures=True)
    desk.answers["kv_settle"] = [LogCorrupt("kv_scales.json does not hash")]
    with pytest.raises(EngineFailed, match=r"^version 1 has no KV scales: kv_scales.json does not hash$"):
        await load(make(), engine, AWAITING)


async def test_an_engine_that_cannot_measure_scales_that_it_is_to_have_fails_and_says_what_instead(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    engine.fail = "its attention has attention sinks"
    desk.gives(None, measures=True)
    words = r"^its attention has attention sinks; kv_cache.scales_policy: reuse needs no measurement$"
    with pytest.raises(EngineFailed, match=words):
        await load(make(KNOWN), engine, AWAITING)


async def test_an_engine_that_cannot_measure_whether_fp8_does_goes_on_with_it_and_says_so_to_the_fleet(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    engine.fail = "its attention has attention sinks"
    calibrator = make(None)
    await load(calibrator, engine, BRINGS)
    why = "not measured: its attention has attention sinks"
    assert calibrator.status == KVCacheStatus(choice=KVCacheChoice(dtype="fp8_e4m3", why=why))
    assert desk.names() == ["choose_kv_cache"]  # or the next replica could find BF16, and this one stay in FP8


async def test_an_error_that_is_not_rays_is_not_waited_for(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    desk.gives(None, measures=True)
    desk.answers["kv_settle"] = [TypeError("a bug")]
    with pytest.raises(TypeError, match="a bug"):
        await load(make(), engine, AWAITING)


# --- what it says


async def test_the_status_is_of_the_version_that_was_measured_last(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    calibrator = make()
    for number in (1, 2):
        desk.gives(OTHERS, measures=True)
        desk.settles(number, OTHERS)
        await load(calibrator, engine, version(number))
        status = calibrator.status
        assert status is not None and (status.choice, status.measured_version, status.unfit) == (KNOWN, number, {})
        assert status.saturated == dict.fromkeys(LAYERS, (0, 0))
        assert status.measured_s is not None and status.measured_s > 0
    desk.gives(OTHERS, measures=False)
    await load(calibrator, engine, version(3))
    assert calibrator.status == status


async def test_keys_that_are_not_numbers_leave_a_status_that_a_client_can_read(
    make: Make, engine: FakeMeasuringEngine, desk: FakeCoordinator
) -> None:
    engine.keys[LAYERS[1]] = [ordinary() * math.nan]
    desk.gives(OTHERS, measures=True)
    desk.settles(1, OTHERS)
    calibrator = make()
    await load(calibrator, engine, AWAITING)
    assert calibrator.status is not None and list(calibrator.status.unfit) == [LAYERS[1]]
    assert calibrator.status.saturated[LAYERS[0]] == (0, 0)
    assert KVCacheStatus.model_validate_json(calibrator.status.model_dump_json()) == calibrator.status


async def test_a_bf16_cache_needs_nothing(desk: FakeCoordinator) -> None:
    bf16 = KVCacheChoice(dtype="bfloat16", why="kv_cache.dtype says so")
    nothing = NoKVScales(bf16)
    await nothing.loaded(AWAITING)
    assert await nothing.scales_for(AWAITING) is None  # type: ignore[func-returns-value]
    assert nothing.status == KVCacheStatus(choice=bf16) and NoKVScales().status is None
