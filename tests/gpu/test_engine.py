"""A real engine on a GPU, with its kernels: it holds what was quantized, and its logprobs are the reference's."""

import pytest

from rollout_service.quant.formats import FP8_CHANNEL, INT8_CHANNEL
from tests.gpu.held import require_held
from tests.support.models import random_weights
from tests.support.one_engine import mean_difference, running

UPDATES = 20
FP8_MEAN = 0.06
"""As for the CPU engine, tests/engine/test_round_trip.py."""


@pytest.mark.parametrize(("family", "kv_cache"), [("qwen3", "bfloat16"), ("qwen3_moe", "fp8_e4m3")])
async def test_an_engine_holds_exact_fp8_weights_after_20_updates(family, kv_cache, tmp_path, monkeypatch):
    settings = {
        "enforce_eager": True,
        "linear_backend": "cutlass",
        "kv_cache_dtype": kv_cache,
        "gpu_memory_utilization": 0.1,
    }
    async with running(family, tmp_path, monkeypatch, **settings) as one:
        for version in range(1, UPDATES + 2):
            weights = random_weights(one.config.model.path, seed=version)
            folder = await one.update(version, weights)
            if version in (1, UPDATES + 1):
                await require_held(one, weights)
        assert await mean_difference(one, folder, fp8=True) < FP8_MEAN


@pytest.mark.parametrize("form", [FP8_CHANNEL, INT8_CHANNEL], ids=lambda form: form.name)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_an_engine_with_channels_holds_what_was_quantized_and_loads_it_by_the_plan(
    family, form, tmp_path, monkeypatch
):
    """In CUDA graphs, with an FP8 cache; CUTLASS' kernels, and for experts Triton's."""
    settings = {"linear_backend": "cutlass", "kv_cache_dtype": "fp8_e4m3", "gpu_memory_utilization": 0.1}
    graphs = {"cuda_graph_sizes": (1, 8), "max_num_seqs": 8}
    async with running(family, tmp_path, monkeypatch, quant=form.name, **settings, **graphs) as one:
        for version in range(1, 12):
            weights = random_weights(one.config.model.path, seed=version)
            folder = await one.update(version, weights)
            if version in (1, 2, 11):
                await require_held(one, weights, form)
                assert await mean_difference(one, folder, fp8=True) < FP8_MEAN
        assert (await one.load_report())["way"] == "plan"
