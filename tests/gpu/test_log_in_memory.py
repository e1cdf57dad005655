"""An engine that stages from the mapped files of a log in memory holds the bytes of each version."""

import asyncio

import pytest

from rollout_service.store.manifest import read_manifest
from tests.gpu.held import require_held
from tests.support.models import random_weights
from tests.support.one_engine import running

SETTINGS = {"linear_backend": "cutlass", "gpu_memory_utilization": 0.1, "enforce_eager": True, "staging": "device"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_versions_are_staged_from_files_that_are_used_again(family, in_memory, monkeypatch):
    files: list[set[int]] = []
    async with running(family, in_memory, monkeypatch, **SETTINGS) as one:
        for version in range(1, 7):
            weights = random_weights(one.config.model.path, seed=version)
            folder = await one.update(version, weights)
            files.append({path.stat().st_ino for path in folder.glob("*.safetensors")})
            await require_held(one, weights)
            assert (await one.load_report())["way"] == ("layerwise" if version == 1 else "plan")
    assert len(set.union(*files)) == 3 * len(files[0])  # two versions are kept, and one is being written


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_a_version_is_staged_before_it_is_committed(family, in_memory, monkeypatch):
    async with running(family, in_memory, monkeypatch, **SETTINGS) as one:
        for version in range(1, 7):
            weights = random_weights(one.config.model.path, seed=version)
            await one.begin(version, weights)
            while version > 1 and not (await one.engine.ask_workers("has_read_ahead"))[0]:
                await asyncio.sleep(0.01)
            folder = await one.commit_begun(version)
            await one.load(folder, version)
            await require_held(one, weights)
            report = await one.load_report()
            assert report["way"] == ("layerwise" if version == 1 else "plan")
            stored_bytes = sum(tensor.nbytes for tensor in read_manifest(folder).tensors)
            assert report.get("ahead_bytes", 0) == (0 if version == 1 else stored_bytes)
