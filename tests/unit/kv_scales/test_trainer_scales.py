"""KV scales are content of a version like its tensors: checked, digested, resumed with, and in conflict with others."""

import math

import pytest

from rollout_service.client import RolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.errors import InvalidManifest, VersionConflict
from rollout_service.kv_scales import KVScales, LayerScales
from rollout_service.kv_scales.coordinator import VersionScales
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import CommitUpload, upload_digest, with_kv_scales
from rollout_service.store.manifest import Manifest
from rollout_service.store.upload_record import read_record
from tests.support.models import make_model
from tests.unit.client.real_ingest import real_ingest
from tests.unit.ingest.trainer import Trainer, begin_of, changed, started, stream_of

LAYER = "model.layers.0.self_attn"
SCALES = {f"{LAYER}.q_scale": 0.5, f"{LAYER}.k_scale": 2.5, f"{LAYER}.v_scale": 0.125}
"""For the model of one layer."""
OTHERS = {**SCALES, f"{LAYER}.k_scale": 2.75}
K, V = f"{LAYER}.k_scale", f"{LAYER}.v_scale"


def came(manifest: Manifest) -> tuple[object, str]:
    return manifest.kv_scales, manifest.kv_scales_from


class TestCheck:
    @pytest.mark.parametrize(
        ("scales", "what", "names"),
        [
            ({n: s for n, s in SCALES.items() if n != V}, "missing", [V]),
            ({}, "missing", sorted(SCALES)),
            ({**SCALES, "model.layers.1.self_attn.k_scale": 1.0}, "unknown", ["model.layers.1.self_attn.k_scale"]),
            *(
                ({**SCALES, K: value}, "unusable", [f"{K} is {value:g}"])
                for value in (0.0, -1.0, math.nan, math.inf, 1e39, 3e38, 1e-39)  # the last ones in fp32 or times 448
            ),
        ],
    )
    async def test_scales_that_do_not_fit_are_refused_by_name(self, ingest, weights, scales, what, names):
        with pytest.raises(InvalidManifest, match=f"KV scales do not fit the served model.*{what}") as refused:
            await ingest.begin(begin_of(1, weights, scales))
        assert refused.value.detail == {what: names}
        assert [status.version for status in await ingest.versions()] == [0]


class TestCommit:
    async def test_scales_are_in_the_manifest_and_its_digest(self, ingest, trainer, weights, log):
        digests, manifests = [], []
        for version, scales in enumerate([None, SCALES, OTHERS, SCALES], start=1):
            digests.append((await trainer.push(version, weights, scales)).digest)
            manifests.append(log.manifest(version))
        assert digests[1] == digests[3] and len(set(digests)) == 3
        assert [came(manifest) for manifest in manifests[:3]] == [
            (None, "unit"),
            (SCALES, "trainer"),
            (OTHERS, "trainer"),
        ]

    async def test_without_any_it_has_those_of_before_after_a_restart_too(self, config, weights, log):
        async with started(config) as ingest:
            assert came(log.manifest(0)) == (None, "unit")
            await Trainer(ingest).push(1, weights, SCALES)
            await Trainer(ingest).push(2, changed(weights, 1.0))
        async with started(config) as again:
            await Trainer(again).push(3, changed(weights, 2.0))
            assert came(log.manifest(2)) == came(log.manifest(3)) == (SCALES, "reuse")

    @pytest.mark.parametrize(
        "later", [{"kv_cache": {"scales_policy": "unit"}}, {"kv_cache": {"dtype": "bfloat16"}}], ids=["unit", "bf16"]
    )
    async def test_without_any_it_has_none_by_policy_or_with_a_bf16_cache(self, config, weights, log, later):
        async with started(config) as ingest:
            await Trainer(ingest).push(1, weights, SCALES)
        async with started(ServiceConfig.model_validate({**config.model_dump(), **later})) as again:
            await Trainer(again).push(2, weights)
            assert came(log.manifest(2)) == (None, "unit")


@pytest.mark.parametrize(("dtype", "has_effect"), [("bfloat16", False), ("fp8_e4m3", True), ("auto", True)])
def test_a_policy_that_has_no_effect_is_logged(model, caplog, dtype, has_effect):
    given = {"model": {"path": model}, "kv_cache": {"dtype": dtype, "scales_policy": "unit"}}
    config = ServiceConfig.model_validate(given)
    VersionScales(config, ServedModel.of(config.model))
    assert ("kv_cache.scales_policy is unit, which has no effect" in caplog.text) is not has_effect


class TestAgain:
    async def test_the_same_scales_are_the_same_and_others_conflict(self, ingest, trainer, weights):
        await trainer.push(1, weights, SCALES)
        assert (await ingest.begin(begin_of(1, weights, dict(reversed(SCALES.items()))))).missing_parts == ()
        for others in (OTHERS, None):
            with pytest.raises(VersionConflict, match="with other KV scales") as refused:
                await ingest.begin(begin_of(1, weights, others))
            assert len(set(refused.value.detail["digests"])) == 2

    async def test_a_commit_that_means_other_scales_is_refused(self, ingest, trainer, weights):
        plan = await trainer.upload(1, weights, kv_scales=SCALES)
        of_parts = upload_digest(ingest.staged(1).parts.digests[part] for part in range(plan.num_parts))
        for meant in (of_parts, with_kv_scales(of_parts, OTHERS)):
            with pytest.raises(VersionConflict, match="nothing was committed"):
                await ingest.commit(1, CommitUpload(upload_digest=meant))
        right = CommitUpload(upload_digest=with_kv_scales(of_parts, SCALES))
        assert await ingest.commit(1, right) == await ingest.commit(1, right)
        with pytest.raises(VersionConflict, match="push a newer version"):
            await ingest.commit(1, CommitUpload(upload_digest=of_parts))

    async def test_an_upload_keeps_its_scales_over_a_restart(self, config, weights, log):
        async with started(config) as before:
            plan = await Trainer(before).upload(1, weights, order=[0, 2], kv_scales=SCALES)
        stream = stream_of(weights)
        async with started(config) as again:
            for part in (await again.status(1)).missing_parts:
                await Trainer(again).put(1, part, stream[part * plan.part_bytes : (part + 1) * plan.part_bytes])
            await again.commit(1, CommitUpload())
            assert came(log.manifest(1)) == (SCALES, "trainer")
            record = read_record(log.folder(1))
            assert record is not None and record.begin.kv_scales == SCALES


def observed(**scales: float) -> KVScales:
    """As ``calibration`` gives them."""
    return KVScales(layers={LAYER: LayerScales(**scales)})


class TestClient:
    async def test_it_pushes_scales_with_weights_and_with_a_path(self, model, tmp_path, weights):
        async with real_ingest(model, tmp_path / "log", weights={"source_roots": [model]}) as service:
            async with RolloutClient(service.url) as client:
                await client.push_weights(1, dict(weights), wait="none", kv_scales=observed(q=0.5, k=2.5, v=0.125))
                await client.push_path(2, model, wait="none", kv_scales=observed(q=0.5, k=2.75, v=0.125))
            assert came(service.log.manifest(1)) == (SCALES, "trainer")
            assert came(service.log.manifest(2)) == (OTHERS, "trainer")


@pytest.mark.parametrize(
    ("family", "sections", "reason"),
    [
        ("llama", {"kv_cache": {"dtype": "bfloat16"}}, "kv_cache.dtype is bfloat16"),
        ("llama", {"quant": {"weights": "none"}, "scaling": {"num_gpus": 1}}, "quant.weights is none"),
        ("deepseek_v3", {"kv_cache": {"dtype": "fp8_e4m3"}}, "has no attention layers that take them"),
    ],
)
def test_scales_are_refused_where_nothing_uses_them(tmp_path, family, sections, reason):
    model = make_model(tmp_path / "model", family)
    scales = VersionScales(
        ServiceConfig.model_validate({"model": {"path": model}, **sections}), ServedModel.load(model)
    )
    scales.check(None)
    with pytest.raises(InvalidManifest, match=f"brings 3 KV scales, but .*{reason}"):
        scales.check(SCALES)
