"""What the ingest tells of KV scales when it is asked for metrics."""

from pathlib import Path

from rollout_service.config import ServiceConfig
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.kv_scales import KVMeasurement, LayerError
from tests.unit.ingest.trainer import Trainer, Weights, config_of, replica

LAYER = "model.layers.0.self_attn"
SCALES = {f"{LAYER}.q_scale": 0.5, f"{LAYER}.k_scale": 2.0, f"{LAYER}.v_scale": 0.125}
OTHERS = {**SCALES, f"{LAYER}.k_scale": 5.0}
NO_ERROR = LayerError(**dict.fromkeys(LayerError.model_fields, 0.0))


async def shown(ingest: Ingest) -> tuple[dict[int, dict[str, float]], float | None]:
    kv_scales = (await ingest.state()).kv_scales
    return kv_scales.by_version, kv_scales.drift


async def test_kv_scales_of_kept_versions_are_known_after_a_restart(config: ServiceConfig, weights: Weights) -> None:
    ingest = Ingest(config)
    await ingest.start()
    await ingest.report(replica("a", 0))
    trainer = Trainer(ingest)
    assert await shown(ingest) == ({}, None)
    await trainer.push(1, weights, SCALES)
    assert await shown(ingest) == ({1: SCALES}, None)
    await trainer.push(2, weights, OTHERS)
    assert await shown(ingest) == ({1: SCALES, 2: OTHERS}, 1.5)
    await ingest.report(replica("a", 2, sequence=1))
    for version in range(3, 3 + config.weights.keep_versions):
        await trainer.push(version, weights)
    kept = {status.version for status in await ingest.versions()}
    assert 1 not in kept and await shown(ingest) == (dict.fromkeys(kept, OTHERS), 0.0)
    await ingest.stop()

    again = Ingest(config)
    await again.start()
    assert await shown(again) == (dict.fromkeys(kept, OTHERS), None)
    await again.stop()


async def test_kv_scales_of_a_version_appear_once_they_are_measured(
    model: Path, weights: Weights, tmp_path: Path
) -> None:
    ingest = Ingest(config_of(model, tmp_path / "log", kv_cache={"scales_policy": "calibrate"}))
    await ingest.start()
    for version, k_amax in enumerate((448.0, 1792.0)):
        if version:
            await Trainer(ingest).push(version, weights)
        before, _ = await shown(ingest)
        assert version not in before
        seen = KVMeasurement(amax={LAYER: ((448.0, k_amax, 448.0),)}, errors={LAYER: NO_ERROR}, tokens=64)
        result = await ingest.kv.publish_result(version, "a", [seen], (await ingest.status(version)).digest)
        after, drift = await shown(ingest)
        assert result.scales is not None and after == {**before, version: result.scales}
    assert drift == 3.0
    await ingest.stop()
