"""A replica measures a version without scales, or while the accuracy of FP8 is unknown, and chooses its cache."""

import math
from pathlib import Path
from typing import Any

import pytest

from rollout_service.config import ServiceConfig
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
from rollout_service.metrics import process, table
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import KVCacheChoice, KVCacheStatus
from rollout_service.store.manifest import Manifest, Recipe
from tests.support.families import make_family
from tests.support.models import make_model
from tests.unit.engine.measuring import LAYERS, FakeCoordinator, FakeMeasuringEngine, all_scales, loud, ordinary, uneven
from tests.unit.metrics.counts import Counts

KNOWN = KVCacheChoice(dtype="fp8_e4m3", why="found before", judged_by="r0, version 0")
OTHERS, FOURS = all_scales(0.5, 0.5, 0.5), all_scales(1 / 64, 16, 1 / 64)
"""Scales of a version before, and what suits keys up to 4096."""


def version(number: int, **scales: Any) -> Manifest:
    """One that awaits its scales, unless they are given."""
    kv_scales = scales or {"kv_scales_from": "calibrate"}
    return Manifest(version=number, fingerprint="model", recipe=Recipe(weights="none"), tensors=(), **kv_scales)


AWAITING, BRINGS = version(1), version(1, kv_scales=OTHERS, kv_scales_from="trainer")


class Replica:
    """A replica's calibrator, by default one that knows that FP8 is accurate enough, and what it talks to."""

    def __init__(self) -> None:
        self.engine, self.coordinator = FakeMeasuringEngine(), FakeCoordinator()
        self.batch = CalibrationBatch(None, vocab_size=100, max_model_len=8)

    def calibrator(self, choice: KVCacheChoice | None = KNOWN) -> KVCalibrator:
        return KVCalibrator("r1", self.engine, self.coordinator, self.batch, choice, retry_s=0.001)

    async def load(self, calibrator: KVCalibrator, manifest: Manifest) -> None:
        """As ``WeightSync`` does it."""
        self.engine.scales = await calibrator.scales_for(manifest) or manifest.kv_scales
        await calibrator.loaded(manifest)


@pytest.fixture
def replica() -> Replica:
    return Replica()


class TestMeasuring:
    async def test_a_version_with_scales_is_neither_asked_for_nor_measured(self, replica):
        calibrator = replica.calibrator()
        assert await calibrator.scales_for(BRINGS) is None
        await calibrator.loaded(BRINGS)
        assert replica.engine.calls == [] and replica.coordinator.asked == []
        assert calibrator.status == KVCacheStatus(choice=KNOWN)

    async def test_scales_that_another_replica_measured_are_just_loaded(self, replica):
        replica.coordinator.has_published(1, OTHERS)
        calibrator = replica.calibrator()
        assert await calibrator.scales_for(AWAITING) == OTHERS
        await calibrator.loaded(AWAITING)
        assert replica.engine.calls == [] and replica.coordinator.asked == [("measured_kv_scales", 1, AWAITING.digest)]
        assert calibrator.status is not None and calibrator.status.measured_version is None

    async def test_a_version_without_scales_is_measured_on_every_rank(self, replica):
        replica.engine.keys = {layer: [ordinary(), loud()] for layer in LAYERS}
        replica.coordinator.publishes(1, FOURS)
        await replica.load(replica.calibrator(), AWAITING)
        [(_, asked_version, replica_id, ranks, digest)] = replica.coordinator.asked_for("publish_kv_scales")
        assert (asked_version, replica_id, digest) == (1, "r1", AWAITING.digest)
        assert [rank.amax[LAYERS[0]] for rank in ranks] == [((4, 4, 4),), ((4, 4096, 4),)]
        assert replica.engine.batches[0] == replica.batch.sequences() and ranks[0].tokens == 16 * 8

    @pytest.mark.parametrize(
        ("keys", "published", "calls"),
        [
            (ordinary(), all_scales(0.01, 0.01, 0.01), ["measure", "set"]),
            (ordinary(), all_scales(0.01, 0.005, 0.01), ["measure", "set", "measure"]),
            (loud(), all_scales(10, 10, 10), ["measure", "set", "measure"]),
        ],
        ids=["all is within the new scales", "some keys are beyond them", "the old ones were unfit"],
    )
    async def test_it_measures_again_only_where_their_cost_is_not_known(self, replica, keys, published, calls):
        replica.engine.keys = {layer: [keys] for layer in LAYERS}
        replica.coordinator.publishes(1, published)
        calibrator = replica.calibrator()
        await replica.load(calibrator, AWAITING)
        assert replica.engine.calls == calls and replica.engine.scales == published
        [now] = await replica.engine.measure_kv([[1, 2]])
        expected = {layer: (error.k_saturated, error.v_saturated) for layer, error in now.errors.items()}
        assert calibrator.status is not None and calibrator.status.saturated == expected

    async def test_a_first_measurement_that_failed_leaves_the_scales_of_1(self, replica):
        replica.coordinator.publishes(1, None)
        await replica.load(replica.calibrator(), AWAITING)
        assert replica.engine.calls == ["measure"] and replica.engine.scales is None


class TestAccuracy:
    @pytest.mark.parametrize("awaits", [True, False], ids=["measured by another", "brings its scales"])
    async def test_while_nobody_has_chosen_it_measures_with_any_scales(self, replica, awaits):
        replica.coordinator.has_published(1, OTHERS)
        calibrator = replica.calibrator(None)
        assert calibrator.status is None
        await replica.load(calibrator, AWAITING if awaits else BRINGS)
        assert replica.engine.calls == ["measure", "judge"] and "publish_kv_scales" not in replica.coordinator.names()
        why = "FP8 is accurate enough for all 2 layers, measured on random tokens"
        choice = KVCacheChoice(dtype="fp8_e4m3", why=why, judged_by="r1, version 1")
        assert replica.coordinator.asked[-1] == ("choose_kv_cache", choice)
        assert calibrator.status is not None and calibrator.status.choice == choice

    async def test_it_is_judged_with_the_best_scales_and_not_those_it_has(self, replica):
        replica.engine.keys[LAYERS[1]] = [loud()]
        calibrator = replica.calibrator(None)
        await replica.load(calibrator, version(1, kv_scales=None, kv_scales_from="unit"))
        status = calibrator.status
        assert status is not None and status.choice.dtype == "fp8_e4m3"
        assert list(status.unfit) == [LAYERS[1]] and "k_saturated 1 is above 0.001" in status.unfit[LAYERS[1]]
        assert status.saturated == {LAYERS[0]: (0, 0), LAYERS[1]: (1, 0)}

    async def test_it_is_judged_by_the_rank_that_is_worst(self, replica):
        replica.engine.keys = {layer: [ordinary(), uneven(), ordinary()] for layer in LAYERS}
        with pytest.raises(KVCacheUnfit, match="2 of 2 layers"):
            await replica.load(replica.calibrator(None), BRINGS)

    async def test_keys_that_no_scale_saves_are_refused_with_the_reasons(self, replica):
        replica.engine.keys[LAYERS[1]] = [uneven()]
        replica.coordinator.publishes(1, OTHERS)
        calibrator = replica.calibrator(None)
        words = rf"^FP8 is not accurate .* 1 of 2 layers: {LAYERS[1]}: k_channel_relative 0\.\d+ is above 0\.25$"
        with pytest.raises(KVCacheUnfit, match=words) as refused:
            await replica.load(calibrator, AWAITING)
        assert list(refused.value.detail["layers"]) == [LAYERS[1]]
        assert refused.value.detail["judged_by"] == "r1, version 1"
        assert "choose_kv_cache" not in replica.coordinator.names() and calibrator.status is None

    async def test_once_it_has_chosen_it_does_not_choose_again(self, replica):
        calibrator = replica.calibrator(None)
        await replica.load(calibrator, BRINGS)
        replica.engine.keys[LAYERS[1]] = [uneven()]
        await replica.load(calibrator, BRINGS)
        assert replica.engine.calls == ["measure", "judge"] and replica.coordinator.names() == ["choose_kv_cache"]

    async def test_a_model_that_becomes_unfit_is_served_and_says_why(self, replica):
        replica.engine.keys[LAYERS[1]] = [uneven()]
        replica.coordinator.publishes(1, OTHERS)
        calibrator = replica.calibrator(KNOWN)
        await replica.load(calibrator, AWAITING)
        assert calibrator.status is not None and list(calibrator.status.unfit) == [LAYERS[1]]
        assert calibrator.status.choice == KNOWN

    async def test_keys_that_are_zero_tell_nothing_and_that_is_noted(self, replica):
        replica.engine.keys[LAYERS[1]] = [ordinary() * 0]
        calibrator = replica.calibrator(None)
        await replica.load(calibrator, BRINGS)
        assert calibrator.status is not None and replica.coordinator.asked == [
            ("choose_kv_cache", calibrator.status.choice)
        ]
        assert calibrator.status.choice.dtype == "fp8_e4m3"
        assert calibrator.status.choice.why.startswith("not measured: 1 tensors were zero throughout")


class TestFailures:
    @pytest.mark.parametrize(
        "why",
        [NotReady("it died"), DeploymentFailed("a bug there"), InsufficientStorage("make room"), TimeoutError()],
        ids=lambda why: type(why).__name__,
    )
    async def test_what_the_ingest_does_not_take_is_published_later(self, replica, why):
        replica.engine.keys[LAYERS[0]] = [loud()]
        replica.coordinator.answers["publish_kv_scales"] = [why, why]
        replica.coordinator.publishes(1, FOURS)
        calibrator = replica.calibrator()
        words = f"^the measured KV scales of version 1 are not stored yet: {str(why) or 'the ingest does not answer'}$"
        with pytest.raises(NotReady, match=words):
            await replica.load(calibrator, AWAITING)
        with pytest.raises(NotReady, match=words):
            await calibrator.scales_for(AWAITING)
        assert await calibrator.scales_for(AWAITING) == FOURS
        assert replica.coordinator.names() == ["measured_kv_scales"] + ["publish_kv_scales"] * 3
        assert len({id(asked[3]) for asked in replica.coordinator.asked[1:]}) == 1 and replica.engine.calls == [
            "measure"
        ]
        replica.engine.scales = FOURS
        assert await calibrator.loaded(AWAITING) == FOURS
        assert len(replica.coordinator.asked) == 4 and replica.engine.calls == ["measure"]

    async def test_an_ingest_that_does_not_answer_is_not_waited_for(self, replica, monkeypatch):
        monkeypatch.setattr("rollout_service.kv_scales.calibrator.PUBLISH_S", 0)
        replica.coordinator.publishes(1, FOURS)
        with pytest.raises(NotReady, match="not stored yet: the ingest does not answer"):
            await replica.load(replica.calibrator(), AWAITING)

    async def test_scales_of_a_version_overtaken_are_not_published(self, replica):
        replica.coordinator.answers["publish_kv_scales"] = [NotReady("it died")]
        calibrator = replica.calibrator()
        with pytest.raises(NotReady):
            await replica.load(calibrator, AWAITING)
        replica.coordinator.has_published(2, FOURS)
        assert await calibrator.scales_for(version(2)) == FOURS
        assert replica.coordinator.names() == ["measured_kv_scales", "publish_kv_scales", "measured_kv_scales"]

    async def test_it_returns_the_scales_that_the_version_has(self, replica):
        replica.coordinator.publishes(1, FOURS)
        calibrator = replica.calibrator()
        await calibrator.scales_for(AWAITING)
        assert await calibrator.loaded(AWAITING) == FOURS
        replica.coordinator.has_published(2, OTHERS)
        await calibrator.scales_for(version(2))
        assert await calibrator.loaded(version(2)) == OTHERS
        await calibrator.scales_for(BRINGS)
        assert await calibrator.loaded(BRINGS) is None

    async def test_it_does_not_serve_in_fp8_before_that_is_noted_for_all(self, replica):
        replica.coordinator.answers["choose_kv_cache"] = [NotReady("it died"), InsufficientStorage("make room")]
        calibrator = replica.calibrator(None)
        await replica.load(calibrator, BRINGS)
        assert replica.coordinator.names() == ["choose_kv_cache"] * 3 and calibrator.error is None
        assert calibrator.status is not None and "accurate enough for all 2 layers" in calibrator.status.choice.why
        await replica.load(calibrator, BRINGS)
        assert replica.coordinator.names() == ["choose_kv_cache"] * 3

    @pytest.mark.parametrize("measured", [True, False], ids=["it found FP8 accurate enough", "it could not measure"])
    async def test_fp8_gives_way_to_what_another_replica_found_before(self, replica, measured):
        held = KVCacheChoice(dtype="bfloat16", why="not for 1 of 2 layers", judged_by="r0, version 0")
        replica.coordinator.answers["choose_kv_cache"] = [held]
        replica.engine.fail = None if measured else "its attention has attention sinks"
        calibrator = replica.calibrator(None)
        with pytest.raises(KVCacheUnfit, match="not for 1 of 2 layers") as refused:
            await replica.load(calibrator, BRINGS)
        assert refused.value.detail["judged_by"] == "r0, version 0" and calibrator.status is None

    async def test_a_version_that_was_removed_meanwhile_is_not_found(self, replica):
        replica.coordinator.answers["publish_kv_scales"] = [
            NotFound("version 1 is not in the log any more", {"version": 1})
        ]
        with pytest.raises(NotFound, match="version 1 is not in the log any more"):
            await replica.load(replica.calibrator(), AWAITING)
        assert replica.engine.calls == ["measure"]

    async def test_any_other_answer_to_a_measurement_fails_the_engine(self, replica):
        replica.coordinator.answers["publish_kv_scales"] = [LogCorrupt("kv_scales.json does not hash")]
        with pytest.raises(EngineFailed, match=r"^version 1 has no KV scales: kv_scales.json does not hash$"):
            await replica.load(replica.calibrator(), AWAITING)

    async def test_an_engine_that_cannot_measure_says_what_instead(self, replica):
        calibrator = replica.calibrator(KNOWN)
        replica.engine.fail = "its attention has attention sinks"
        words = r"^its attention has attention sinks; kv_cache.scales_policy: reuse needs no measurement$"
        with pytest.raises(EngineFailed, match=words):
            await replica.load(calibrator, AWAITING)
        assert "choose_kv_cache" not in replica.coordinator.names()

    async def test_scales_that_fp8_was_not_measured_with_are_served(self, replica):
        replica.engine.fail = "its attention has attention sinks"
        calibrator = replica.calibrator(None)
        await replica.load(calibrator, BRINGS)
        why = "not measured: its attention has attention sinks"
        assert calibrator.status == KVCacheStatus(choice=KVCacheChoice(dtype="fp8_e4m3", why=why))
        assert replica.coordinator.names() == [
            "choose_kv_cache"
        ]  # or the next replica could find BF16, and this one stay in FP8


class TestStatus:
    async def test_the_status_is_of_the_version_that_was_measured_last(self, replica, monkeypatch):
        counts = Counts()
        monkeypatch.setattr(process, "sink", counts)
        calibrator, seconds = replica.calibrator(), []
        for number in (1, 2):
            replica.coordinator.publishes(number, OTHERS)
            await replica.load(calibrator, version(number))
            status = calibrator.status
            assert status is not None and (status.choice, status.measured_version, status.unfit) == (KNOWN, number, {})
            assert status.saturated == dict.fromkeys(LAYERS, (0, 0))
            assert status.measured_s is not None and status.measured_s > 0
            seconds.append(status.measured_s)
        replica.coordinator.has_published(1, OTHERS)
        await replica.load(calibrator, version(3))
        assert calibrator.status == status
        assert counts.values == {(table.KV_CALIBRATION_SECONDS.name,): seconds}

    async def test_keys_that_are_not_numbers_leave_a_status_to_be_read(self, replica):
        replica.engine.keys[LAYERS[1]] = [ordinary() * math.nan]
        replica.coordinator.publishes(1, OTHERS)
        calibrator = replica.calibrator()
        await replica.load(calibrator, AWAITING)
        assert calibrator.status is not None and list(calibrator.status.unfit) == [LAYERS[1]]
        assert calibrator.status.saturated[LAYERS[0]] == (0, 0)
        assert KVCacheStatus.model_validate_json(calibrator.status.model_dump_json()) == calibrator.status

    async def test_a_bf16_cache_needs_nothing(self, replica):
        bf16 = KVCacheChoice(dtype="bfloat16", why="kv_cache.dtype says so")
        nothing = NoKVScales(bf16)
        await nothing.loaded(AWAITING)
        assert await nothing.scales_for(AWAITING) is None
        assert nothing.status == KVCacheStatus(choice=bf16) and NoKVScales().status is None


FOUND_FP8 = KVCacheChoice(dtype="fp8_e4m3", why="accurate enough for all layers", judged_by="r0, version 0")
FOUND_BF16 = KVCacheChoice(dtype="bfloat16", why="not for 2 of 2 layers", judged_by="r0, version 0")


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
    def test_it_starts_with_what_was_found_before_or_finds_out(self, models, dtype, known, expected):
        assert starting_choice(dtype, models["keys and values"], known) == expected

    @pytest.mark.parametrize("known", [None, FOUND_FP8, FOUND_BF16])
    @pytest.mark.parametrize("attention", ["keys and values", "latent", "multimodal"])
    def test_bf16_holds_where_it_is_asked_for(self, models, attention, known):
        expected = KVCacheChoice(dtype="bfloat16", why="kv_cache.dtype says so")
        assert starting_choice("bfloat16", models[attention], known) == expected

    @pytest.mark.parametrize("known", [None, FOUND_FP8, FOUND_BF16])
    @pytest.mark.parametrize(("dtype", "expected"), [("auto", "bfloat16"), ("fp8_e4m3", "fp8_e4m3")])
    def test_latent_attention_gets_fp8_by_name_alone_unmeasured(self, models, dtype, expected, known):
        choice = starting_choice(dtype, models["latent"], known)
        assert choice is not None and choice.dtype == expected
        assert "latent attention" in choice.why and choice.judged_by == ""

    def test_a_multimodal_model_keeps_bf16_and_fp8_by_name_is_refused(self, models):
        choice = starting_choice("auto", models["multimodal"], None)
        assert choice is not None and choice.dtype == "bfloat16" and "multimodal" in choice.why
        with pytest.raises(ValueError, match="multimodal is multimodal, whose KV scales are not known here: set it to"):
            starting_choice("fp8_e4m3", models["multimodal"], None)

    async def test_bf16_holds_for_all_unless_another_choice_was_first(self):
        coordinator = FakeCoordinator()
        coordinator.answers["choose_kv_cache"] = [NotReady("it died"), FOUND_FP8]
        judged = "not for 1 of 2 layers", "r1, version 3"
        with pytest.raises(NotReady, match="it died"):
            await choose_bf16(coordinator, *judged)
        assert await choose_bf16(coordinator, *judged) == FOUND_FP8
        held = await choose_bf16(coordinator, *judged)
        assert held == KVCacheChoice(dtype="bfloat16", why=judged[0], judged_by=judged[1])
        assert coordinator.asked[-1] == ("choose_kv_cache", held)

    async def test_a_processor_without_fp8_is_noted_unless_a_choice_is(self):
        coordinator = FakeCoordinator()
        alone = KVCacheChoice(dtype="bfloat16", why="it has no AVX-512", judged_by="r1")
        assert await without_fp8(coordinator, None, "it has no AVX-512", "r1") == alone
        assert coordinator.asked == [("choose_kv_cache", alone)]
        coordinator.asked.clear()
        assert await without_fp8(coordinator, FOUND_BF16, "it has no AVX-512", "r1") == FOUND_BF16
        assert await without_fp8(coordinator, FOUND_FP8, "it has no AVX-512", "r1") == alone
        assert coordinator.asked == []
        coordinator.answers["choose_kv_cache"] = [FOUND_FP8]  # by a replica that was quicker
        assert await without_fp8(coordinator, None, "it has no AVX-512", "r1") == alone

    @pytest.mark.parametrize("policy", ["calibrate", "reuse", "unit"])
    @pytest.mark.parametrize("choice", [FOUND_FP8, FOUND_BF16], ids=lambda choice: choice.dtype)
    def test_an_engine_is_configured_with_it_and_nothing_else(self, choice, policy):
        config = ServiceConfig.model_validate(
            {"kv_cache": {"scales_policy": policy, "calibration_prompts": Path("p")}, "model": {"path": Path("m")}}
        )
        chosen = with_kv_cache(config, choice)
        expected_policy = policy if choice is FOUND_FP8 else "unit"
        assert (chosen.kv_cache.dtype, chosen.kv_cache.scales_policy) == (choice.dtype, expected_policy)
        assert chosen.model_copy(update={"kv_cache": config.kv_cache}) == config
        assert chosen.kv_cache.calibration_prompts == Path("p")
        assert ServiceConfig.model_validate(chosen.model_dump()) == chosen
