"""KV scales are content of a version like its tensors: checked, digested, resumed with, and in conflict with others."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from rollout_service.client import RolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.errors import InvalidManifest, VersionConflict
from rollout_service.ingest.ingest import Ingest
from rollout_service.kv_scales import KVScales, LayerScales, Provenance
from rollout_service.kv_scales.policy import KVScalesRule, drift
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import BeginUpload, CommitUpload, PathSource, upload_digest, with_kv_scales
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest, Recipe
from rollout_service.store.upload_record import read_record
from tests.support.models import FAMILIES, make_model
from tests.unit.client.real_ingest import real_ingest
from tests.unit.ingest.trainer import Trainer, Weights, begin_of, changed, config_of, stream_of
from tests.unit.kv_scales.measured import Calibrating, measured, scales_of

LAYER = "model.layers.0.self_attn"
SCALES = {f"{LAYER}.q_scale": 0.5, f"{LAYER}.k_scale": 2.5, f"{LAYER}.v_scale": 0.125}
"""For the model of one layer."""
OTHERS = {**SCALES, f"{LAYER}.k_scale": 2.75}
K, V = f"{LAYER}.k_scale", f"{LAYER}.v_scale"


async def start(config: ServiceConfig) -> Ingest:
    ingest = Ingest(config)
    await ingest.start()
    return ingest


def came(manifest: Manifest) -> tuple[object, str]:
    return manifest.kv_scales, manifest.kv_scales_from


# --- which scales fit


@pytest.mark.parametrize(
    ("scales", "what", "names"),
    [
        ({n: s for n, s in SCALES.items() if n != V}, "missing", [V]),
        ({}, "missing", sorted(SCALES)),
        ({**SCALES, "model.layers.1.self_attn.k_scale": 1.0}, "unknown", ["model.layers.1.self_attn.k_scale"]),
        ({**SCALES, K: 0.0}, "unusable", [f"{K} is 0"]),
        ({**SCALES, K: -1.0}, "unusable", [f"{K} is -1"]),
        ({**SCALES, K: float("nan")}, "unusable", [f"{K} is nan"]),
        ({**SCALES, K: float("inf")}, "unusable", [f"{K} is inf"]),
        ({**SCALES, K: 1e39}, "unusable", [f"{K} is 1e+39"]),
        ({**SCALES, K: 3e38}, "unusable", [f"{K} is 3e+38"]),
        ({**SCALES, K: 1e-39}, "unusable", [f"{K} is 1e-39"]),
    ],
    ids=[
        "one missing",
        "all missing",
        "unknown",
        "zero",
        "negative",
        "nan",
        "inf",
        "beyond fp32",
        "overflows",
        "subnormal",
    ],
)
async def test_scales_that_do_not_fit_are_refused_by_name_before_anything_is_sent(
    ingest: Ingest, weights: Weights, scales: dict[str, float], what: str, names: list[str]
) -> None:
    with pytest.raises(InvalidManifest, match=f"KV scales do not fit the served model.*{what}") as refused:
        await ingest.begin(begin_of(1, weights, scales))
    assert refused.value.detail == {what: names}
    assert [status.version for status in await ingest.versions()] == [0]


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"kv_cache": {"dtype": "bfloat16"}}, "kv_cache.dtype is bfloat16"),
        ({"quant": {"weights": "none"}, "scaling": {"num_gpus": 1}}, "quant.weights is none"),
    ],
)
def test_scales_that_no_engine_could_use_are_refused(model: Path, sections: dict[str, Any], reason: str) -> None:
    config = ServiceConfig.model_validate({"model": {"path": model}, **sections})
    rule = KVScalesRule(config, ServedModel.load(model))
    rule.check(None)
    with pytest.raises(InvalidManifest, match=f"brings 3 KV scales, but .*{reason}"):
        rule.check(SCALES)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_names_the_layers_that_have_keys_and_values(tmp_path: Path, family: str) -> None:
    served = ServedModel.load(make_model(tmp_path, family))
    expected = () if family == "deepseek_v3" else ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert served.attention == expected


# --- what a version gets


async def test_a_version_has_the_scales_that_came_with_it_and_another_digest_than_without(
    ingest: Ingest, trainer: Trainer, weights: Weights, log: WeightLog
) -> None:
    digests, manifests = [], []
    for version, scales in enumerate([None, SCALES, OTHERS, SCALES], start=1):
        digests.append((await trainer.push(version, weights, scales)).digest)
        manifests.append(log.manifest(version))
    assert digests[1] == digests[3] and len(set(digests)) == 3
    assert [came(manifest) for manifest in manifests[:3]] == [(None, "unit"), (SCALES, "trainer"), (OTHERS, "trainer")]


async def test_a_version_without_scales_has_those_of_the_one_before_after_a_restart_too(
    config: ServiceConfig, weights: Weights, log: WeightLog
) -> None:
    ingest = await start(config)
    await Trainer(ingest).push(1, weights, SCALES)
    await Trainer(ingest).push(2, changed(weights, 1.0))
    await ingest.stop()
    again = await start(config)
    await Trainer(again).push(3, changed(weights, 2.0))
    assert came(log.manifest(2)) == came(log.manifest(3)) == (SCALES, "reuse")
    await again.stop()


@pytest.mark.parametrize(
    "later", [{"kv_cache": {"scales_policy": "unit"}}, {"kv_cache": {"dtype": "bfloat16"}}], ids=["unit", "bf16"]
)
async def test_a_version_without_scales_has_none_where_the_policy_says_so_or_the_cache_is_bf16(
    config: ServiceConfig, weights: Weights, log: WeightLog, later: dict[str, Any]
) -> None:
    ingest = await start(config)
    await Trainer(ingest).push(1, weights, SCALES)
    await ingest.stop()
    again = await start(ServiceConfig.model_validate({**config.model_dump(), **later}))
    await Trainer(again).push(2, weights)
    assert came(log.manifest(2)) == (None, "unit")
    await again.stop()


# --- what a version gets that is to be measured


@pytest.fixture
def calibrating(model: Path, tmp_path: Path) -> Calibrating:
    """Every version that comes without scales is measured."""
    return Calibrating(tmp_path / "log", model)


ONES, TWOS = measured((448, 448, 448)), measured((896, 896, 896))


def test_every_version_without_scales_is_measured(calibrating: Calibrating) -> None:
    for version, (ranks, scales) in enumerate([(ONES, scales_of(1, 1, 1)), (TWOS, scales_of(2, 2, 2))]):
        assert came(calibrating.commit(version)) == (None, "calibrate")
        assert calibrating.settle(version, ranks).scales == scales


def test_so_is_one_after_a_trainers_scales_which_hold_until_then(calibrating: Calibrating) -> None:
    calibrating.measure(0, ONES)
    assert came(calibrating.commit(1, OTHERS)) == (OTHERS, "trainer")
    assert calibrating.rule.newest == OTHERS
    assert came(calibrating.commit(2)) == (None, "calibrate")


@pytest.mark.parametrize(
    ("policy", "expected"), [("reuse", ["unit", "reuse"]), ("unit", ["unit", "unit"])], ids=["reuse", "unit"]
)
def test_nothing_is_measured_unless_the_policy_says_so(model: Path, policy: str, expected: list[str]) -> None:
    config = ServiceConfig.model_validate({"model": {"path": model}, "kv_cache": {"scales_policy": policy}})
    rule, got = KVScalesRule(config, ServedModel.load(model)), []
    for version, scales in enumerate([None, SCALES, None]):
        bare = Manifest(version=version, fingerprint="model", recipe=Recipe(weights="none"), tensors=())
        manifest = rule.added_to(bare, scales)
        rule.remember(manifest)
        got.append(manifest.kv_scales_from)
    assert [got[0], got[2]] == expected


@pytest.mark.parametrize(
    ("family", "sections", "reason"),
    [
        ("deepseek_v3", {}, "has no attention layers that take them"),
        ("llama", {"quant": {"weights": "none"}, "scaling": {"num_gpus": 1}}, "quant.weights is none"),
    ],
    ids=["latent attention", "BF16 weights on a GPU"],
)
def test_an_ingest_does_not_start_to_have_scales_measured_that_nothing_uses(
    tmp_path: Path, family: str, sections: dict[str, Any], reason: str
) -> None:
    model = make_model(tmp_path / "model", family)
    config = config_of(model, tmp_path / "log", kv_cache={"scales_policy": "calibrate"}, **sections)
    with pytest.raises(ValueError, match=f"kv_cache.scales_policy is calibrate, but .*{reason}"):
        Ingest(config)
    Ingest(config_of(model, tmp_path / "log", **sections))


def test_the_drift_is_the_largest_factor_between_scales_of_one_name() -> None:
    assert drift(None, SCALES) is drift(SCALES, None) is None
    assert drift(SCALES, SCALES) == 0
    assert drift(SCALES, OTHERS) == drift(OTHERS, SCALES) == pytest.approx(2.75 / 2.5 - 1)
    assert drift(SCALES, {**OTHERS, V: 0.0625}) == 1.0


# --- the same version once more


@pytest.mark.parametrize("committed", [False, True], ids=["staged", "committed"])
async def test_a_version_begun_again_with_the_same_scales_is_the_same_and_with_others_conflicts_with_both_digests(
    ingest: Ingest, trainer: Trainer, weights: Weights, committed: bool
) -> None:
    await trainer.upload(1, weights, kv_scales=SCALES)
    if committed:
        await ingest.commit(1, CommitUpload())
    assert (await ingest.begin(begin_of(1, weights, dict(reversed(SCALES.items()))))).missing_parts == ()
    for others in (OTHERS, None):
        with pytest.raises(VersionConflict, match="with other KV scales") as refused:
            await ingest.begin(begin_of(1, weights, others))
        assert len(set(refused.value.detail["digests"])) == 2


async def test_a_commit_that_means_other_scales_is_refused(ingest: Ingest, trainer: Trainer, weights: Weights) -> None:
    plan = await trainer.upload(1, weights, kv_scales=SCALES)
    of_parts = upload_digest(ingest.staged(1).digests[part] for part in range(plan.num_parts))
    for meant in (of_parts, with_kv_scales(of_parts, OTHERS)):
        with pytest.raises(VersionConflict, match="nothing was committed"):
            await ingest.commit(1, CommitUpload(upload_digest=meant))
    right = CommitUpload(upload_digest=with_kv_scales(of_parts, SCALES))
    assert await ingest.commit(1, right) == await ingest.commit(1, right)
    with pytest.raises(VersionConflict, match="push a newer version"):
        await ingest.commit(1, CommitUpload(upload_digest=of_parts))


async def test_an_upload_keeps_its_scales_over_a_restart_and_in_its_record(
    config: ServiceConfig, weights: Weights, log: WeightLog
) -> None:
    before = await start(config)
    plan = await Trainer(before).upload(1, weights, order=[0, 2], kv_scales=SCALES)
    await before.stop()
    again, stream = await start(config), stream_of(weights)
    for part in (await again.status(1)).missing_parts:
        await Trainer(again).put(1, part, stream[part * plan.part_bytes : (part + 1) * plan.part_bytes])
    await again.commit(1, CommitUpload())
    assert came(log.manifest(1)) == (SCALES, "trainer")
    record = read_record(log.folder(1))
    assert record is not None and record.begin.kv_scales == SCALES
    await again.stop()


async def test_a_path_brings_scales_too(model: Path, tmp_path: Path, weights: Weights) -> None:
    source = tmp_path / "sources"
    source.mkdir()
    save_file(dict(weights), source / "model.safetensors")
    ingest = await start(config_of(model, tmp_path / "log", weights={"source_roots": [source]}).resolved())
    begin = BeginUpload(version=1, source=PathSource(path=source), kv_scales=SCALES)
    await ingest.begin(begin)
    await ingest.commit(1, CommitUpload())
    assert came(WeightLog(tmp_path / "log").manifest(1)) == (SCALES, "trainer")
    assert (await ingest.begin(begin)).state == "committed"
    with pytest.raises(VersionConflict, match="with other KV scales"):
        await ingest.begin(begin.model_copy(update={"kv_scales": OTHERS}))
    await ingest.stop()


# --- from the client


def observed(**scales: float) -> KVScales:
    """As ``calibration`` gives them."""
    how = Provenance(tokens=64, micro_batches=1, percentile=99.9, margin=1.05)
    return KVScales(model="one layer", layers={LAYER: LayerScales(**scales)}, provenance=how)


async def test_the_client_pushes_measured_scales_with_weights_and_with_a_path(
    model: Path, tmp_path: Path, weights: Weights
) -> None:
    async with real_ingest(model, tmp_path / "log", weights={"source_roots": [model]}) as service:
        async with RolloutClient(service.url) as client:
            first = await client.push_weights(1, dict(weights), wait="none", kv_scales=observed(q=0.5, k=2.5, v=0.125))
            again = await client.push_weights(1, dict(weights), wait="none", kv_scales=observed(q=0.5, k=2.5, v=0.125))
            assert first == again
            with pytest.raises(VersionConflict, match="other KV scales"):
                await client.push_weights(1, dict(weights), wait="none", kv_scales=observed(q=0.5, k=2.75, v=0.125))
            await client.push_path(2, model, wait="none", kv_scales=observed(q=0.5, k=2.75, v=0.125))
            elsewhere = {"model.layers.7.self_attn": LayerScales(q=1, k=1, v=1)}
            stranger = observed(q=1, k=1, v=1).model_copy(update={"layers": elsewhere})
            with pytest.raises(InvalidManifest, match=r"unknown: model\.layers\.7\.self_attn\.k_scale"):
                await client.push_weights(3, dict(weights), wait="none", kv_scales=stranger)
        assert came(service.log.manifest(1)) == (SCALES, "trainer")
        assert came(service.log.manifest(2)) == (OTHERS, "trainer")
