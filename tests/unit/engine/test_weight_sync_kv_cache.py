"""A replica chooses its KV cache after the first load, and before it serves."""

import pytest

from rollout_service.config import WeightsConfig
from rollout_service.engine.weight_sync import WeightSync
from rollout_service.errors import KVCacheUnfit
from rollout_service.kv_scales.cache_choice import CacheChooser
from tests.unit.engine.fakes import FakeEngine, push, serving
from tests.unit.engine.measuring import LAYERS, FakeCoordinator, FakeMeasuringEngine, uneven


class Measured(FakeMeasuringEngine):
    """Measures between the calls of an engine."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self.calls = engine.calls


@pytest.fixture
def measured(engine: FakeEngine) -> Measured:
    return Measured(engine)


@pytest.fixture
def new(log, engine, ingest, measured) -> WeightSync:
    """Not started yet."""
    chooser = CacheChooser("r1", measured, FakeCoordinator(), [[1, 2]], None, retry_s=0.001, falls_back=True)
    return WeightSync("r1", engine, ingest, WeightsConfig(root=log.root, poll_s=0.01), "model", kv_cache=chooser)


async def test_the_first_version_is_measured_before_the_engine_resumes(new, log, engine, ingest):
    assert new.status().kv_cache is None
    await new.start()
    assert engine.calls == ["pause keep", "load 0", "measure", "resume"]
    status = new.status()
    assert status.kv_cache is not None and status.kv_cache.measured_version == 0
    engine.calls.clear()
    await push(log, ingest, 1)
    await serving(new, ingest, 1)
    new.stop()
    assert engine.calls == ["pause keep", "load 1", "resume"]


async def test_a_model_that_is_unfit_for_fp8_does_not_start(new, engine, measured):
    measured.keys = {layer: [uneven()] for layer in LAYERS}
    with pytest.raises(KVCacheUnfit, match="of 2 of 2 layers"):
        await new.start()
    assert "resume" not in engine.calls and new.version is None
