"""Engines of one machine that stage in host memory share it, and load from it what each would have read itself."""

from pathlib import Path

import pytest

from rollout_service.engine.loading.staging import shared_name
from tests.support.engine_layout import engine_digests, quantize
from tests.support.models import random_weights
from tests.support.one_engine import OneEngine, engine_of, running
from tests.support.probe import DECODED

SETTINGS = {"linear_backend": "cutlass", "gpu_memory_utilization": 0.1, "enforce_eager": True, "staging": "host"}


def memories(log: Path) -> dict[int, set[int]]:
    """Areas of those who follow a log, by inode → the processes that have it mapped."""
    found: dict[int, set[int]] = {}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it has ended
            continue
        for line in lines:
            if f"/memfd:rollout-{shared_name(log)}" in line:
                found.setdefault(int(line.split()[4]), set()).add(int(maps.parent.name))
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_two_engines_load_from_one_area(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(family, tmp_path, monkeypatch, **SETTINGS) as one, engine_of(one.config, monkeypatch) as other:
        two = OneEngine(one.config, other, one._ingest)
        assert (one.engine.staging, two.engine.staging) == ("host", "host")
        for version in (1, 2, 3):
            weights = random_weights(one.config.model.path, seed=version)
            folder = await one.commit(version, weights)
            for each in (one, two):
                await each.engine.stage(folder, None)
            for each in (one, two):
                await each.load(folder, version)
                held, expected = await each.digests(), engine_digests(quantize(weights))
                assert {n for n in expected if not n.endswith(DECODED) and held.get(n) != expected[n]} == set()
                assert (await each.load_report())["way"] == ("layerwise" if version == 1 else "plan")
        [mapped] = memories(one.config.weights.root).values()
        assert len(mapped) == 2


async def test_an_engine_that_dies_leaves_the_area_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running("qwen3", tmp_path, monkeypatch, **SETTINGS) as one:
        async with engine_of(one.config, monkeypatch) as other:
            folder = await one.commit(1, random_weights(one.config.model.path, seed=1))
            await other.stage(folder)  # and holds it
        await one.load(folder, 1)
        await one.update(2, random_weights(one.config.model.path, seed=2))
        assert (await one.load_report())["way"] == "plan"
