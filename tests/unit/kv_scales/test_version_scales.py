"""Which scales a version has: from its trainer, or of the version before."""

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.errors import InvalidManifest
from rollout_service.kv_scales.coordinator import VersionScales
from rollout_service.model.served_model import ServedModel
from rollout_service.store.manifest import Manifest, Recipe
from tests.support.models import make_model

SCALES = {f"model.layers.0.self_attn.{x}_scale": 0.5 for x in "qkv"}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("reuse", [(None, "unit"), (SCALES, "trainer"), (SCALES, "reuse")]),
     ("unit", [(None, "unit"), (SCALES, "trainer"), (None, "unit")])],
)  # fmt: skip
def test_a_version_without_scales_has_them_by_policy(model, policy, expected):
    config = ServiceConfig.model_validate({"model": {"path": model}, "kv_cache": {"scales_policy": policy}})
    scales, got = VersionScales(config, ServedModel.load(model)), []
    for version, brought in enumerate([None, SCALES, None]):
        bare = Manifest(version=version, fingerprint="model", recipe=Recipe(weights="none"), tensors=())
        manifest = scales.with_scales(bare, brought)
        scales.committed(manifest)
        got.append((manifest.kv_scales, manifest.kv_scales_from))
    assert got == expected


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
