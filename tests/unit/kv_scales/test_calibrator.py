"""A replica measures a version without scales, or while the accuracy of FP8 is unknown, and chooses its cache."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_service.config import ServiceConfig
from rollout_service.config.engine import KVCalibrationConfig
from rollout_service.errors import (
    DeploymentFailed,
    EngineFailed,
    InsufficientStorage,
    KVCacheUnfit,
    LogCorrupt,
    NotFound,
    NotReady,
)
from rollout_service.kv_scales.batch import CalibrationBatch
from rollout_service.kv_scales.calibrator import (
    KVCalibrator,
    NoKVScales,
    choose_bf16,
    starting_choice,
    with_kv_cache,
    without_fp8,
)
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import KVCacheChoice, KVCacheStatus
from rollout_service.store.manifest import Manifest, Recipe
from tests.support.families import make_family
from tests.support.models import make_model
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
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def batch() -> CalibrationBatch:
    return CalibrationBatch(KVCalibrationConfig(max_sequences=2), vocab_size=100, max_model_len=8)


@pytest.fixture
def make(engine: FakeMeasuringEngine, coordinator: FakeCoordinator, batch: CalibrationBatch) -> Make:
    return lambda choice=KNOWN: KVCalibrator("r1", engine, coordinator, batch, choice, retry_s=0.001)


async def load(calibrator: KVCalibrator, engine: FakeMeasuringEngine, manifest: Manifest) -> None:
    """As ``WeightSync`` does it."""
    found = await calibrator.scales_for(manifest)
    engine.scales = found or manifest.kv_scales
    await calibrator.loaded(manifest)


class TestMeasuring:
    async def test_a_version_with_scales_is_neither_asked_for_nor_measured(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        calibrator = make()
        assert await calibrator.scales_for(BRINGS) is None
        await calibrator.loaded(BRINGS)
        assert engine.calls == [] and coordinator.asked == []
        assert calibrator.status == KVCacheStatus(choice=KNOWN)

    async def test_scales_that_another_replica_measured_are_just_loaded(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        coordinator.has_published(1, OTHERS)
        calibrator = make()
        assert await calibrator.scales_for(AWAITING) == OTHERS
        await calibrator.loaded(AWAITING)
        assert engine.calls == [] and coordinator.asked == [("measured_kv_scales", 1, AWAITING.digest)]
        assert calibrator.status is not None and calibrator.status.measured_version is None

    async def test_a_version_without_scales_is_measured_on_every_rank(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator, batch: CalibrationBatch
    ) -> None:
        engine.keys = {layer: [ordinary(), loud()] for layer in LAYERS}
        coordinator.publishes(1, FOURS)
        await load(make(), engine, AWAITING)
        [(_, asked_version, replica_id, ranks, digest)] = coordinator.asked_for("publish_kv_scales")
        assert (asked_version, replica_id, digest) == (1, "r1", AWAITING.digest)
        assert [rank.amax[LAYERS[0]] for rank in ranks] == [((4, 4, 4),), ((4, 4096, 4),)]
        assert engine.batches[0] == batch.sequences() and ranks[0].tokens == 16

    @pytest.mark.parametrize(
        ("keys", "published", "calls"),
        [
            (ordinary(), all_scales(0.01, 0.01, 0.01), ["measure", "set"]),
            (ordinary(), all_scales(0.01, 0.005, 0.01), ["measure", "set", "measure"]),
            (loud(), all_scales(10, 10, 10), ["measure", "set", "measure"]),
        ],
        ids=["all is within the new scales", "some keys are beyond them", "the old ones were unfit"],
    )
    async def test_it_measures_again_only_where_their_cost_is_not_known(
        self,
        make: Make,
        engine: FakeMeasuringEngine,
        coordinator: FakeCoordinator,
        keys: torch.Tensor,
        published: dict[str, float],
        calls: list[str],
    ) -> None:
        engine.keys = {layer: [keys] for layer in LAYERS}
        coordinator.publishes(1, published)
        calibrator = make()
        await load(calibrator, engine, AWAITING)
        assert engine.calls == calls and engine.scales == published
        [now] = await engine.measure_kv([[1, 2]])
        expected = {layer: (error.k_saturated, error.v_saturated) for layer, error in now.errors.items()}
        assert calibrator.status is not None and calibrator.status.saturated == expected

    async def test_a_first_measurement_that_failed_leaves_the_scales_of_1(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        coordinator.publishes(1, None)
        await load(make(), engine, AWAITING)
        assert engine.calls == ["measure"] and engine.scales is None


class TestAccuracy:
    @pytest.mark.parametrize("awaits", [True, False], ids=["measured by another", "brings its scales"])
    async def test_while_nobody_has_chosen_it_measures_with_any_scales(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator, awaits: bool
    ) -> None:
        coordinator.has_published(1, OTHERS)
        calibrator = make(None)
        assert calibrator.status is None
        await load(calibrator, engine, AWAITING if awaits else BRINGS)
        assert engine.calls == ["measure", "judge"] and "publish_kv_scales" not in coordinator.names()
        why = "FP8 is accurate enough for all 2 layers, measured on random tokens"
        choice = KVCacheChoice(dtype="fp8_e4m3", why=why, judged_by="r1, version 1")
        assert coordinator.asked[-1] == ("choose_kv_cache", choice)
        assert calibrator.status is not None and calibrator.status.choice == choice

    async def test_it_is_judged_with_the_best_scales_and_not_those_it_has(
        self, make: Make, engine: FakeMeasuringEngine
    ) -> None:
        engine.keys[LAYERS[1]] = [loud()]
        calibrator = make(None)
        await load(calibrator, engine, version(1, kv_scales=None, kv_scales_from="unit"))
        status = calibrator.status
        assert status is not None and status.choice.dtype == "fp8_e4m3"
        assert list(status.unfit) == [LAYERS[1]] and "k_saturated 1 is above 0.001" in status.unfit[LAYERS[1]]
        assert status.saturated == {LAYERS[0]: (0, 0), LAYERS[1]: (1, 0)}

    async def test_it_is_judged_by_the_rank_that_is_worst(self, make: Make, engine: FakeMeasuringEngine) -> None:
        engine.keys = {layer: [ordinary(), uneven(), ordinary()] for layer in LAYERS}
        with pytest.raises(KVCacheUnfit, match="2 of 2 layers"):
            await load(make(None), engine, BRINGS)

    async def test_keys_that_no_scale_saves_are_refused_with_the_reasons(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        engine.keys[LAYERS[1]] = [uneven()]
        coordinator.publishes(1, OTHERS)
        calibrator = make(None)
        words = rf"^FP8 is not accurate .* 1 of 2 layers: {LAYERS[1]}: k_channel_relative 0\.\d+ is above 0\.25$"
        with pytest.raises(KVCacheUnfit, match=words) as refused:
            await load(calibrator, engine, AWAITING)
        assert list(refused.value.detail["layers"]) == [LAYERS[1]]
        assert refused.value.detail["judged_by"] == "r1, version 1"
        assert "choose_kv_cache" not in coordinator.names() and calibrator.status is None

    async def test_once_it_has_chosen_it_does_not_choose_again(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        calibrator = make(None)
        await load(calibrator, engine, BRINGS)
        engine.keys[LAYERS[1]] = [uneven()]
        await load(calibrator, engine, BRINGS)
        assert engine.calls == ["measure", "judge"] and coordinator.names() == ["choose_kv_cache"]

    async def test_a_model_that_becomes_unfit_is_served_and_says_why(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        engine.keys[LAYERS[1]] = [uneven()]
        coordinator.publishes(1, OTHERS)
        calibrator = make(KNOWN)
        await load(calibrator, engine, AWAITING)
        assert calibrator.status is not None and list(calibrator.status.unfit) == [LAYERS[1]]
        assert calibrator.status.choice == KNOWN

    async def test_keys_that_are_zero_tell_nothing_and_that_is_noted(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        engine.keys[LAYERS[1]] = [ordinary() * 0]
        calibrator = make(None)
        await load(calibrator, engine, BRINGS)
        assert calibrator.status is not None and coordinator.asked == [("choose_kv_cache", calibrator.status.choice)]
        assert calibrator.status.choice.dtype == "fp8_e4m3"
        assert calibrator.status.choice.why.startswith("not measured: 1 tensors were zero throughout")


class TestFailures:
    @pytest.mark.parametrize(
        "why",
        [NotReady("it died"), DeploymentFailed("a bug there"), InsufficientStorage("make room"), TimeoutError()],
        ids=lambda why: type(why).__name__,
    )
    async def test_what_the_ingest_does_not_take_is_published_later(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator, why: Exception
    ) -> None:
        engine.keys[LAYERS[0]] = [loud()]
        coordinator.answers["publish_kv_scales"] = [why, why]
        coordinator.publishes(1, FOURS)
        calibrator = make()
        words = f"^the measured KV scales of version 1 are not stored yet: {str(why) or 'the ingest does not answer'}$"
        with pytest.raises(NotReady, match=words):
            await load(calibrator, engine, AWAITING)
        with pytest.raises(NotReady, match=words):
            await calibrator.scales_for(AWAITING)
        assert await calibrator.scales_for(AWAITING) == FOURS
        assert coordinator.names() == ["measured_kv_scales"] + ["publish_kv_scales"] * 3
        assert len({id(asked[3]) for asked in coordinator.asked[1:]}) == 1 and engine.calls == ["measure"]
        engine.scales = FOURS
        assert await calibrator.loaded(AWAITING) == FOURS
        assert len(coordinator.asked) == 4 and engine.calls == ["measure"]

    async def test_an_ingest_that_does_not_answer_is_not_waited_for(
        self,
        make: Make,
        engine: FakeMeasuringEngine,
        coordinator: FakeCoordinator,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("rollout_service.kv_scales.calibrator.PUBLISH_S", 0)
        coordinator.publishes(1, FOURS)
        with pytest.raises(NotReady, match="not stored yet: the ingest does not answer"):
            await load(make(), engine, AWAITING)

    async def test_scales_of_a_version_overtaken_are_not_published(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        coordinator.answers["publish_kv_scales"] = [NotReady("it died")]
        calibrator = make()
        with pytest.raises(NotReady):
            await load(calibrator, engine, AWAITING)
        coordinator.has_published(2, FOURS)
        assert await calibrator.scales_for(version(2)) == FOURS
        assert coordinator.names() == ["measured_kv_scales", "publish_kv_scales", "measured_kv_scales"]

    async def test_it_returns_the_scales_that_the_version_has(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        coordinator.publishes(1, FOURS)
        calibrator = make()
        await calibrator.scales_for(AWAITING)
        assert await calibrator.loaded(AWAITING) == FOURS
        coordinator.has_published(2, OTHERS)
        await calibrator.scales_for(version(2))
        assert await calibrator.loaded(version(2)) == OTHERS
        await calibrator.scales_for(BRINGS)
        assert await calibrator.loaded(BRINGS) is None

    async def test_it_does_not_serve_in_fp8_before_that_is_noted_for_all(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        coordinator.answers["choose_kv_cache"] = [NotReady("it died"), InsufficientStorage("make room")]
        calibrator = make(None)
        await load(calibrator, engine, BRINGS)
        assert coordinator.names() == ["choose_kv_cache"] * 3 and calibrator.error is None
        assert calibrator.status is not None and "accurate enough for all 2 layers" in calibrator.status.choice.why
        await load(calibrator, engine, BRINGS)
        assert coordinator.names() == ["choose_kv_cache"] * 3

    @pytest.mark.parametrize("measured", [True, False], ids=["it found FP8 accurate enough", "it could not measure"])
    async def test_fp8_gives_way_to_what_another_replica_found_before(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator, measured: bool
    ) -> None:
        held = KVCacheChoice(dtype="bfloat16", why="not for 1 of 2 layers", judged_by="r0, version 0")
        coordinator.answers["choose_kv_cache"] = [held]
        engine.fail = None if measured else "its attention has attention sinks"
        calibrator = make(None)
        with pytest.raises(KVCacheUnfit, match="not for 1 of 2 layers") as refused:
            await load(calibrator, engine, BRINGS)
        assert refused.value.detail["judged_by"] == "r0, version 0" and calibrator.status is None

    async def test_a_version_that_was_removed_meanwhile_is_not_found(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        coordinator.answers["publish_kv_scales"] = [NotFound("version 1 is not in the log any more", {"version": 1})]
        with pytest.raises(NotFound, match="version 1 is not in the log any more"):
            await load(make(), engine, AWAITING)
        assert engine.calls == ["measure"]

    async def test_any_other_answer_to_a_measurement_fails_the_engine(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        coordinator.answers["publish_kv_scales"] = [LogCorrupt("kv_scales.json does not hash")]
        with pytest.raises(EngineFailed, match=r"^version 1 has no KV scales: kv_scales.json does not hash$"):
            await load(make(), engine, AWAITING)

    async def test_an_engine_that_cannot_measure_says_what_instead(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        calibrator = make(KNOWN)
        engine.fail = "its attention has attention sinks"
        words = r"^its attention has attention sinks; kv_cache.scales_policy: reuse needs no measurement$"
        with pytest.raises(EngineFailed, match=words):
            await load(calibrator, engine, AWAITING)
        assert "choose_kv_cache" not in coordinator.names()

    async def test_scales_that_fp8_was_not_measured_with_are_served(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        engine.fail = "its attention has attention sinks"
        calibrator = make(None)
        await load(calibrator, engine, BRINGS)
        why = "not measured: its attention has attention sinks"
        assert calibrator.status == KVCacheStatus(choice=KVCacheChoice(dtype="fp8_e4m3", why=why))
        assert coordinator.names() == [
            "choose_kv_cache"
        ]  # or the next replica could find BF16, and this one stay in FP8


class TestStatus:
    async def test_the_status_is_of_the_version_that_was_measured_last(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        calibrator = make()
        for number in (1, 2):
            coordinator.publishes(number, OTHERS)
            await load(calibrator, engine, version(number))
            status = calibrator.status
            assert status is not None and (status.choice, status.measured_version, status.unfit) == (KNOWN, number, {})
            assert status.saturated == dict.fromkeys(LAYERS, (0, 0))
            assert status.measured_s is not None and status.measured_s > 0
        coordinator.has_published(1, OTHERS)
        await load(calibrator, engine, version(3))
        assert calibrator.status == status

    async def test_keys_that_are_not_numbers_leave_a_status_to_be_read(
        self, make: Make, engine: FakeMeasuringEngine, coordinator: FakeCoordinator
    ) -> None:
        engine.keys[LAYERS[1]] = [ordinary() * math.nan]
        coordinator.publishes(1, OTHERS)
        calibrator = make()
        await load(calibrator, engine, AWAITING)
        assert calibrator.status is not None and list(calibrator.status.unfit) == [LAYERS[1]]
        assert calibrator.status.saturated[LAYERS[0]] == (0, 0)
        assert KVCacheStatus.model_validate_json(calibrator.status.model_dump_json()) == calibrator.status

    async def test_a_bf16_cache_needs_nothing(self, coordinator: FakeCoordinator) -> None:
        bf16 = KVCacheChoice(dtype="bfloat16", why="kv_cache.dtype says so")
        nothing = NoKVScales(bf16)
        await nothing.loaded(AWAITING)
        assert await nothing.scales_for(AWAITING) is None  # type: ignore[func-returns-value]
        assert nothing.status == KVCacheStatus(choice=bf16) and NoKVScales().status is None


FOUND_FP8 = KVCacheChoice(dtype="fp8_e4m3", why="accurate enough for all layers", judged_by="r0, version 0")
FOUND_BF16 = KVCacheChoice(dtype="bfloat16", why="not for 2 of 2 layers", judged_by="r0, version 0")
UNFIT = KVCacheUnfit("not for 1 of 2 layers", {"layers": {"l.0": "why"}, "judged_by": "r1, version 3"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    families = {"keys and values": "llama", "latent": "deepseek_v3"}
    folder = tmp_path_factory.mktemp("models")
    made = {kind: make_model(folder / kind, family) for kind, family in families.items()}
    made["multimodal"] = make_family(folder / "multimodal", "qwen3_vl")
    return {kind: ServedModel.load(path) for kind, path in made.items()}


class TestCacheDtype:
    @pytest.mark.parametrize(
        ("dtype", "known", "expected"),
        [
            ("auto", None, None),
            ("auto", FOUND_FP8, FOUND_FP8),
            ("auto", FOUND_BF16, FOUND_BF16),
            ("fp8_e4m3", None, None),
            ("fp8_e4m3", FOUND_FP8, FOUND_FP8),
            ("fp8_e4m3", FOUND_BF16, None),
        ],
    )
    def test_it_starts_with_what_was_found_before_or_finds_out(
        self, models: dict[str, ServedModel], dtype: str, known: KVCacheChoice | None, expected: KVCacheChoice | None
    ) -> None:
        assert starting_choice(dtype, models["keys and values"], known) == expected

    @pytest.mark.parametrize("known", [None, FOUND_FP8, FOUND_BF16])
    @pytest.mark.parametrize("attention", ["keys and values", "latent", "multimodal"])
    def test_bf16_holds_where_it_is_asked_for(
        self, models: dict[str, ServedModel], attention: str, known: KVCacheChoice | None
    ) -> None:
        expected = KVCacheChoice(dtype="bfloat16", why="kv_cache.dtype says so")
        assert starting_choice("bfloat16", models[attention], known) == expected

    @pytest.mark.parametrize("known", [None, FOUND_FP8, FOUND_BF16])
    @pytest.mark.parametrize(("dtype", "expected"), [("auto", "bfloat16"), ("fp8_e4m3", "fp8_e4m3")])
    def test_latent_attention_gets_fp8_by_name_alone_unmeasured(
        self, models: dict[str, ServedModel], dtype: str, expected: str, known: KVCacheChoice | None
    ) -> None:
        choice = starting_choice(dtype, models["latent"], known)
        assert choice is not None and choice.dtype == expected
        assert "latent attention" in choice.why and choice.judged_by == ""

    def test_a_multimodal_model_keeps_bf16_and_fp8_by_name_is_refused(self, models: dict[str, ServedModel]) -> None:
        choice = starting_choice("auto", models["multimodal"], None)
        assert choice is not None and choice.dtype == "bfloat16" and "multimodal" in choice.why
        with pytest.raises(ValueError, match="multimodal is multimodal, whose KV scales are not known here: set it to"):
            starting_choice("fp8_e4m3", models["multimodal"], None)

    async def test_bf16_is_noted_for_all_with_the_reasons(self) -> None:
        coordinator = FakeCoordinator()
        held = await choose_bf16(coordinator, UNFIT.message, str(UNFIT.detail["judged_by"]))
        assert held == KVCacheChoice(dtype="bfloat16", why=UNFIT.message, judged_by="r1, version 3")
        assert coordinator.asked == [("choose_kv_cache", held)]

    @pytest.mark.parametrize("first", [FOUND_FP8, FOUND_BF16], ids=lambda choice: choice.dtype)
    async def test_a_replica_takes_what_another_one_noted_first(self, first: KVCacheChoice) -> None:
        coordinator = FakeCoordinator()
        coordinator.answers["choose_kv_cache"] = [first]
        assert await choose_bf16(coordinator, UNFIT.message, str(UNFIT.detail["judged_by"])) == first

    async def test_it_does_not_fall_back_while_the_ingest_is_away(self) -> None:
        coordinator = FakeCoordinator()
        coordinator.answers["choose_kv_cache"] = [NotReady("it died")]
        with pytest.raises(NotReady, match="it died"):
            await choose_bf16(coordinator, UNFIT.message, str(UNFIT.detail["judged_by"]))

    async def test_a_processor_without_fp8_is_noted_for_all_as_the_reason(self) -> None:
        coordinator = FakeCoordinator()
        held = await without_fp8(coordinator, None, "it has no AVX-512", "r1")
        assert held == KVCacheChoice(dtype="bfloat16", why="it has no AVX-512", judged_by="r1")
        assert coordinator.asked == [("choose_kv_cache", held)]

    async def test_without_fp8_what_is_noted_already_stays(self) -> None:
        coordinator = FakeCoordinator()
        alone = KVCacheChoice(dtype="bfloat16", why="it has no AVX-512", judged_by="r1")
        assert await without_fp8(coordinator, FOUND_BF16, "it has no AVX-512", "r1") == FOUND_BF16
        assert await without_fp8(coordinator, FOUND_FP8, "it has no AVX-512", "r1") == alone
        assert coordinator.asked == []
        coordinator.answers["choose_kv_cache"] = [FOUND_FP8]  # by a replica that was quicker
        assert await without_fp8(coordinator, None, "it has no AVX-512", "r1") == alone

    @pytest.mark.parametrize("policy", ["calibrate", "reuse", "unit"])
    @pytest.mark.parametrize("choice", [FOUND_FP8, FOUND_BF16], ids=lambda choice: choice.dtype)
    def test_an_engine_is_configured_with_it_and_nothing_else(self, choice: KVCacheChoice, policy: str) -> None:
        config = ServiceConfig.model_validate(
            {"kv_cache": {"scales_policy": policy, "calibration": {"max_sequences": 2}}, "model": {"path": Path("m")}}
        )
        chosen = with_kv_cache(config, choice)
        expected_policy = policy if choice is FOUND_FP8 else "unit"
        assert (chosen.kv_cache.dtype, chosen.kv_cache.scales_policy) == (choice.dtype, expected_policy)
        assert chosen.model_copy(update={"kv_cache": config.kv_cache}) == config
        assert chosen.kv_cache.calibration == config.kv_cache.calibration
        assert ServiceConfig.model_validate(chosen.model_dump()) == chosen
