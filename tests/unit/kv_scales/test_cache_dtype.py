"""What a replica keeps keys and values in: as configured, as chosen before, or as the first one finds."""

from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError

from rollout_service.config import ServiceConfig
from rollout_service.errors import KVCacheUnfit, NotReady
from rollout_service.kv_scales.cache_dtype import chosen_before, fallen_back, with_kv_cache
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import KVCacheChoice
from tests.support.models import make_model
from tests.unit.engine.measuring import FakeCoordinator

FP8 = KVCacheChoice(dtype="fp8_e4m3", why="all layers bear it", judged_by="r0, version 0")
BF16 = KVCacheChoice(dtype="bfloat16", why="2 of 2 layers do not", judged_by="r0, version 0")
UNFIT = KVCacheUnfit("1 of 2 layers do not bear it", {"layers": {"l.0": "why"}, "judged_by": "r1, version 3"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    families = {"keys and values": "llama", "latent": "deepseek_v3"}
    folder = tmp_path_factory.mktemp("models")
    return {kind: ServedModel.load(make_model(folder / kind, family)) for kind, family in families.items()}


# --- what it starts with


@pytest.mark.parametrize(
    ("dtype", "known", "expected"),
    [
        ("auto", None, None),
        ("auto", FP8, FP8),
        ("auto", BF16, BF16),
        ("fp8_e4m3", None, None),
        ("fp8_e4m3", FP8, FP8),
        ("fp8_e4m3", BF16, None),
    ],
)
def test_it_starts_with_what_was_found_before_or_finds_out(
    models: dict[str, ServedModel], dtype: str, known: KVCacheChoice | None, expected: KVCacheChoice | None
) -> None:
    assert chosen_before(dtype, models["keys and values"], known) == expected


@pytest.mark.parametrize("known", [None, FP8, BF16])
@pytest.mark.parametrize("attention", ["keys and values", "latent"])
def test_bf16_holds_where_it_is_asked_for(
    models: dict[str, ServedModel], attention: str, known: KVCacheChoice | None
) -> None:
    expected = KVCacheChoice(dtype="bfloat16", why="kv_cache.dtype says so")
    assert chosen_before("bfloat16", models[attention], known) == expected


@pytest.mark.parametrize("known", [None, FP8, BF16])
@pytest.mark.parametrize(("dtype", "expected"), [("auto", "bfloat16"), ("fp8_e4m3", "fp8_e4m3")])
def test_latent_attention_is_not_measured_and_gets_fp8_by_name_alone(
    models: dict[str, ServedModel], dtype: str, expected: str, known: KVCacheChoice | None
) -> None:
    choice = chosen_before(dtype, models["latent"], known)
    assert choice is not None and choice.dtype == expected
    assert "latent attention" in choice.why and choice.judged_by == ""


# --- falling back


async def test_a_model_that_does_not_bear_fp8_gets_bf16_and_the_reasons_are_noted_for_all() -> None:
    desk = FakeCoordinator()
    held = await fallen_back(desk, UNFIT)
    assert held == KVCacheChoice(dtype="bfloat16", why=UNFIT.message, judged_by="r1, version 3")
    assert desk.asked == [("choose_kv_cache", held)]


@pytest.mark.parametrize("first", [FP8, BF16], ids=lambda choice: choice.dtype)
async def test_a_replica_takes_what_another_one_noted_first(first: KVCacheChoice) -> None:
    desk = FakeCoordinator()
    desk.answers["choose_kv_cache"] = [first]
    assert await fallen_back(desk, UNFIT) == first


async def test_a_replica_does_not_fall_back_by_itself_while_the_ingest_is_away() -> None:
    desk = FakeCoordinator()
    desk.answers["choose_kv_cache"] = [ActorDiedError()]
    with pytest.raises(NotReady, match="died with this call"):
        await fallen_back(desk, UNFIT)


# --- the engine's configuration


@pytest.mark.parametrize("policy", ["calibrate", "reuse", "unit"])
@pytest.mark.parametrize("choice", [FP8, BF16], ids=lambda choice: choice.dtype)
def test_an_engine_is_configured_with_what_was_chosen_and_nothing_else_changes(
    choice: KVCacheChoice, policy: str
) -> None:
    config = ServiceConfig.model_validate(
        {"kv_cache": {"scales_policy": policy, "calibration": {"margin": 2}}, "model": {"path": Path("m")}}
    )
    chosen = with_kv_cache(config, choice)
    expected_policy = policy if choice is FP8 else "unit"
    assert (chosen.kv_cache.dtype, chosen.kv_cache.scales_policy) == (choice.dtype, expected_policy)
    assert chosen.model_copy(update={"kv_cache": config.kv_cache}) == config
    assert chosen.kv_cache.calibration == config.kv_cache.calibration
    assert ServiceConfig.model_validate(chosen.model_dump()) == chosen
