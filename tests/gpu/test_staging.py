"""An engine that stages in host memory loads from there what it would have read from the files."""

import pytest

from tests.support.engine_layout import engine_digests, quantize
from tests.support.models import random_weights
from tests.support.one_engine import running
from tests.support.probe import DECODED

SETTINGS = {"linear_backend": "cutlass", "gpu_memory_utilization": 0.1, "enforce_eager": True, "staging": "host"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_an_engine_loads_from_host_memory(family, tmp_path, monkeypatch):
    async with running(family, tmp_path, monkeypatch, **SETTINGS) as one:
        assert one.engine.staging == "host"
        for version in (1, 2, 3):
            weights = random_weights(one.config.model.path, seed=version)
            folder = await one.commit(version, weights)
            await one.engine.stage(folder, None)
            await one.load(folder, version)
            held, expected = await one.digests(), engine_digests(quantize(weights))
            assert {n for n in expected if not n.endswith(DECODED) and held.get(n) != expected[n]} == set()
            assert (await one.load_report())["way"] == ("layerwise" if version == 1 else "plan")
