"""The first replica measures whether FP8 is accurate enough, and chooses the KV cache for all."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.engine.async_llm import AsyncLLM

from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.worker import VersionStaging
from rollout_service.errors import EngineFailed, InsufficientStorage, InvalidRequest, KVCacheUnfit, NotReady
from rollout_service.kv_scales.cache_choice import (
    CacheChooser,
    choose_bf16,
    random_sequences,
    starting_choice,
    with_kv_cache,
    without_fp8,
)
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import KVCacheChoice, KVCacheStatus
from tests.support.families import make_family
from tests.support.models import make_model
from tests.unit.engine.measuring import LAYERS, FakeCoordinator, FakeMeasuringEngine, loud, ordinary, uneven

KNOWN = KVCacheChoice(dtype="fp8_e4m3", why="found before", judged_by="r0, version 0")
BATCH = [[1, 2, 3, 4]] * 4
SINKS = InvalidRequest("its attention has attention sinks")


class Replica:
    """A replica's chooser that knows no choice yet, and what it talks to."""

    def __init__(self) -> None:
        self.engine, self.coordinator = FakeMeasuringEngine(), FakeCoordinator()
        self.chooser = self.with_choice(None)

    def with_choice(self, choice: KVCacheChoice | None, *, falls_back: bool = False) -> CacheChooser:
        return CacheChooser("r1", self.engine, self.coordinator, BATCH, choice, retry_s=0.001, falls_back=falls_back)


@pytest.fixture
def replica() -> Replica:
    return Replica()


class TestMeasuring:
    async def test_while_nobody_has_chosen_it_measures_and_chooses(self, replica):
        assert replica.chooser.status is None
        await replica.chooser.loaded(1, None)
        assert replica.engine.calls == ["measure", "judge"] and replica.engine.batches == [BATCH, BATCH]
        why = "FP8 is accurate enough for all 2 layers, measured on random tokens"
        choice = KVCacheChoice(dtype="fp8_e4m3", why=why, judged_by="r1, version 1")
        assert replica.coordinator.asked == [choice]
        status = replica.chooser.status
        assert status is not None and (status.choice, status.measured_version, status.unfit) == (choice, 1, {})
        assert status.saturated == dict.fromkeys(LAYERS, (0, 0))

    async def test_a_known_choice_needs_no_measurement(self, replica):
        chooser = replica.with_choice(KNOWN)
        await chooser.loaded(1, None)
        assert replica.engine.calls == replica.coordinator.asked == []
        assert chooser.status == KVCacheStatus(choice=KNOWN)

    async def test_keys_that_its_own_scales_do_not_hold_are_refused_where_bf16_is_the_fallback(self, replica):
        replica.engine.keys[LAYERS[1]] = [loud()]
        with pytest.raises(KVCacheUnfit, match=f"{LAYERS[1]}: k_saturated 1 is above 0.001"):
            await replica.with_choice(None, falls_back=True).loaded(1, None)
        assert replica.engine.calls == ["measure"] and replica.coordinator.asked == []

    async def test_it_is_judged_with_the_best_scales_and_not_those_it_has(self, replica):
        replica.engine.keys[LAYERS[1]] = [loud()]
        await replica.chooser.loaded(1, None)
        status = replica.chooser.status
        assert status is not None and status.choice.dtype == "fp8_e4m3"
        assert list(status.unfit) == [LAYERS[1]] and "k_saturated 1 is above 0.001" in status.unfit[LAYERS[1]]
        assert status.saturated == {LAYERS[0]: (0, 0), LAYERS[1]: (1, 0)}
        replica.engine.keys[LAYERS[1]] = [uneven()]  # once it has chosen, it does not choose again
        await replica.chooser.loaded(2, None)
        assert replica.chooser.status == status and len(replica.coordinator.asked) == 1
        await replica.chooser.loaded(3, {f"{LAYERS[0]}.k_scale": 16.0})
        assert replica.chooser.status == KVCacheStatus(choice=status.choice)

    async def test_keys_that_no_scale_saves_on_any_rank_are_refused_with_the_reasons(self, replica):
        replica.engine.keys = {LAYERS[0]: [ordinary()] * 3, LAYERS[1]: [ordinary(), uneven(), ordinary()]}
        words = rf"^FP8 is not accurate .* 1 of 2 layers: {LAYERS[1]}: k_channel_relative 0\.\d+ is above 0\.25$"
        with pytest.raises(KVCacheUnfit, match=words) as refused:
            await replica.chooser.loaded(1, None)
        assert list(refused.value.detail["layers"]) == [LAYERS[1]]
        assert refused.value.detail["judged_by"] == "r1, version 1"
        assert replica.coordinator.asked == [] and replica.chooser.status is None

    @pytest.mark.parametrize(
        ("factor", "why"), [(0, "1 tensors were zero throughout"), (math.nan, f"{LAYERS[1]}: q, k or v has NaN")]
    )
    async def test_keys_that_tell_nothing_leave_fp8_and_a_status_to_read(self, replica, factor, why):
        replica.engine.keys[LAYERS[1]] = [ordinary() * factor]
        await replica.chooser.loaded(1, None)
        status = replica.chooser.status
        assert status is not None and replica.coordinator.asked == [status.choice]
        assert status.choice.dtype == "fp8_e4m3" and status.choice.why.startswith(f"not measured: {why}")
        assert KVCacheStatus.model_validate_json(status.model_dump_json()) == status

    async def test_a_model_that_cannot_be_measured_gets_fp8(self, replica):
        replica.engine.fail = SINKS
        await replica.chooser.loaded(1, None)
        choice = KVCacheChoice(dtype="fp8_e4m3", why="not measured: its attention has attention sinks")
        assert replica.chooser.status == KVCacheStatus(choice=choice)
        assert replica.coordinator.asked == [choice]  # or the next replica could find BF16, and this one stay in FP8

    async def test_an_engine_that_fails_chooses_nothing_for_the_replicas_after_it(self, replica):
        replica.engine.fail = EngineFailed("CUDA out of memory")
        with pytest.raises(EngineFailed, match="out of memory"):
            await replica.chooser.loaded(1, None)
        assert replica.coordinator.asked == [] and replica.chooser.status is None

    async def test_what_workers_find_in_a_model_is_told_from_a_failure(self, monkeypatch):
        worker = VersionStaging()
        worker.weight_transfer_engine = SimpleNamespace(model=torch.nn.Linear(1, 1), vllm_config=None, device=None)

        class Core:
            errored = is_paused = None

            async def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[object]:
                return [getattr(worker, method)(*args)]

        monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda *_, **__: Core())
        engine = EngineAdapter(SimpleNamespace(additional_config={}))
        with pytest.raises(InvalidRequest, match="nothing to measure: 0 layers with an FP8 cache"):
            await engine.measure_kv(BATCH)
        del worker.weight_transfer_engine
        with pytest.raises(EngineFailed, match=r"no attribute .weight_transfer_engine.; set kv_cache\.dtype: bfloat16"):
            await engine.measure_kv(BATCH)


class TestChoosing:
    async def test_it_does_not_serve_in_fp8_before_that_is_noted_for_all(self, replica):
        replica.coordinator.answers = [NotReady("it died"), InsufficientStorage("make room")]
        await replica.chooser.loaded(1, None)
        assert len(replica.coordinator.asked) == 3 and replica.chooser.error is None
        assert "accurate enough for all 2 layers" in replica.chooser.status.choice.why

    @pytest.mark.parametrize("measured", [True, False], ids=["it found FP8 accurate enough", "it could not measure"])
    async def test_fp8_gives_way_to_what_another_replica_found_before(self, replica, measured):
        held = KVCacheChoice(dtype="bfloat16", why="not for 1 of 2 layers", judged_by="r0, version 0")
        replica.coordinator.answers = [held]
        replica.engine.fail = None if measured else SINKS
        with pytest.raises(KVCacheUnfit, match="not for 1 of 2 layers") as refused:
            await replica.chooser.loaded(1, None)
        assert refused.value.detail["judged_by"] == "r0, version 0" and replica.chooser.status is None


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

    @pytest.mark.parametrize("known", [None, FOUND_FP8])
    def test_what_is_asked_for_holds_without_a_measurement(self, models, known):
        for model in models.values():
            expected = KVCacheChoice(dtype="bfloat16", why="kv_cache.dtype says so")
            assert starting_choice("bfloat16", model, known) == expected
        for dtype, expected in ("auto", "bfloat16"), ("fp8_e4m3", "fp8_e4m3"):
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
        coordinator.answers = [NotReady("it died"), InsufficientStorage("make room"), FOUND_FP8]
        judged = "not for 1 of 2 layers", "r1, version 3"
        assert await choose_bf16(coordinator, *judged, retry_s=0.001) == FOUND_FP8
        assert len(coordinator.asked) == 3
        held = await choose_bf16(coordinator, *judged, retry_s=0.001)
        assert held == KVCacheChoice(dtype="bfloat16", why=judged[0], judged_by=judged[1])
        assert coordinator.asked[-1] == held

    async def test_a_processor_without_fp8_is_noted_unless_a_choice_is(self):
        coordinator = FakeCoordinator()
        alone = KVCacheChoice(dtype="bfloat16", why="it has no AVX-512", judged_by="r1")
        assert await without_fp8(coordinator, None, "it has no AVX-512", "r1", 0.001) == alone
        assert coordinator.asked == [alone]
        coordinator.asked.clear()
        assert await without_fp8(coordinator, FOUND_BF16, "it has no AVX-512", "r1", 0.001) == FOUND_BF16
        assert await without_fp8(coordinator, FOUND_FP8, "it has no AVX-512", "r1", 0.001) == alone
        assert coordinator.asked == []
        coordinator.answers = [FOUND_FP8]  # by a replica that was quicker
        assert await without_fp8(coordinator, None, "it has no AVX-512", "r1", 0.001) == alone

    def test_an_engine_is_configured_with_it_and_nothing_else(self):
        config = ServiceConfig.model_validate({"kv_cache": {"scales_policy": "unit"}, "model": {"path": Path("m")}})
        chosen = with_kv_cache(config, FOUND_BF16)
        assert (chosen.kv_cache.dtype, chosen.kv_cache.scales_policy) == ("bfloat16", "unit")
        assert chosen.model_copy(update={"kv_cache": config.kv_cache}) == config


def test_random_tokens_are_the_same_for_all_and_differ_within():
    found = random_sequences(128, 2048)
    assert found == random_sequences(128, 2048) and {len(each) for each in found} == {64}
    assert {token for each in found for token in each} == set(range(128))
    assert {len(each) for each in random_sequences(128, 2)} == {2}
