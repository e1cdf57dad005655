"""The plan puts into the live parameters what vLLM's layerwise reload would, and captured CUDA graphs see it."""

import pytest
import torch

from rollout_service.gpu.grouped_copy import TILE_BYTES, GroupedCopy, Rows
from tests.gpu.held import require_held
from tests.support.models import random_weights
from tests.support.nvcc import needs_nvcc
from tests.support.one_engine import mean_difference, running

FP8_MEAN = 0.06
"""As for the CPU engine, tests/engine/test_round_trip.py."""


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize(
    ("family", "eager", "linear"),
    [
        ("qwen3", False, "cutlass"),
        pytest.param("qwen3", False, "deep_gemm", marks=needs_nvcc),
        ("qwen3_moe", False, "cutlass"),
        ("qwen2", True, "cutlass"),
    ],
)
async def test_the_plan_leaves_the_bytes_of_the_layerwise_reload(family, eager, linear, staging, tmp_path, monkeypatch):
    settings = {
        "enforce_eager": eager,
        "linear_backend": linear,
        "gpu_memory_utilization": 0.1,
        "staging": staging,
    }
    async with running(family, tmp_path, monkeypatch, **settings) as one:
        assert one.engine.staging == staging
        ways, digests = [], {}
        for version, seed in enumerate((1, 2, 3, 2), start=1):
            weights = random_weights(one.config.model.path, seed=seed)
            folder = await one.update(version, weights)
            report = await one.load_report()
            ways.append(report["way"])
            digests[version] = await require_held(one, weights)
            assert await mean_difference(one, folder, fp8=True) < FP8_MEAN
        assert ways == ["layerwise", "plan", "plan", "plan"], report
        assert digests[4] == digests[2] != digests[3]


async def test_both_ways_leave_identical_bytes(tmp_path, monkeypatch):
    held = []
    for staging in ("device", "none"):
        folder = tmp_path / staging
        folder.mkdir()
        settings = {"enforce_eager": True, "linear_backend": "cutlass", "gpu_memory_utilization": 0.1}
        async with running("qwen3_moe", folder, monkeypatch, staging=staging, **settings) as one:
            for version in (1, 2):
                await one.update(version, random_weights(one.config.model.path, seed=version))
            report = await one.load_report()
            assert report["way"] == ("plan" if staging == "device" else "layerwise")
            held.append(await one.digests())
    assert held[0] == held[1]


async def test_scales_of_the_cache_follow_versions_that_a_plan_loads(tmp_path, monkeypatch):
    settings = {"kv_cache_dtype": "fp8_e4m3", "linear_backend": "cutlass", "gpu_memory_utilization": 0.1}
    async with running("qwen3", tmp_path, monkeypatch, **settings) as one:
        for version, way in ((1, "layerwise"), (2, "plan"), (3, "plan")):
            names = (f"model.layers.{layer}.self_attn.{x}_scale" for layer in range(2) for x in "qkv")
            scales = {name: 1 + (1 + place + 8 * version) / 1024 for place, name in enumerate(names)}
            await one.update(version, random_weights(one.config.model.path, seed=version), scales)
            report = await one.load_report()
            assert (report["way"], report["kv_scales"]) == (way, 6), report
            assert {name: set(copies) for name, copies in (await one.kv_scales()).items()} == {
                name: {scale} for name, scale in scales.items()
            }


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("shift", [0, 4, 3])
def test_grouped_copies_move_every_byte(pinned, shift):
    sizes = [1, 16, 100, TILE_BYTES + 48, 5 * TILE_BYTES]
    source = torch.randint(0, 256, (sum(sizes) + 64 * len(sizes),), dtype=torch.uint8)
    source = source.pin_memory() if pinned else source.cuda()
    target = torch.zeros(source.numel(), dtype=torch.uint8, device="cuda")
    expected, rows, position = torch.zeros_like(target), [], 0
    for size in sizes:
        rows.append(Rows(source.data_ptr() + position + shift, target.data_ptr() + position, size))
        expected[position : position + size] = source[position + shift : position + shift + size]
        position += (size + 63) // 16 * 16
    GroupedCopy(rows, torch.device("cuda")).run()
    torch.cuda.synchronize()
    assert torch.equal(target, expected)
