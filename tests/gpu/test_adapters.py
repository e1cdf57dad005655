"""LoRA adapters on a GPU: dense models and mixtures in FP8, with CUDA graphs, an FP8 KV cache and group attention.

``python -m benchmarks.gpu_tests tests/gpu/test_adapters.py``
"""

import asyncio
from typing import Any

import pytest

from tests.engine.test_adapters import MAX_LIVE, Adapted, unequal_numbers
from tests.engine.test_trainer_as_engine import MEAN, differences
from tests.support.models import random_weights
from tests.support.one_engine import running

MAX_RATIO = 0.25
"""Bound on the mean |Δ| of logprobs from the reference with the own adapter, as a share of that with another one."""
EAGER: dict[str, Any] = {"enforce_eager": True, "cuda_graph_sizes": None}
SMALL = {"cuda_graph_sizes": (1, 8, 16), "gpu_memory_utilization": 0.1, "linear_backend": "cutlass"}


@pytest.mark.parametrize(
    ("family", "kv_cache", "settings"),
    [
        ("qwen3", "bfloat16", {}),
        ("qwen3", "bfloat16", EAGER),
        ("qwen3_moe", "bfloat16", {}),  # vLLM 0.20 to 0.22 made gibberish of FP8 experts with adapters (its #42007)
        ("qwen3_moe_group", "fp8_e4m3", {"attention_backend": "group"}),
    ],
    ids=["dense", "dense eager", "mixture", "mixture with group attention"],
)
async def test_adapters_sample_like_their_references(
    family, kv_cache, settings, tmp_path, monkeypatch, record_property
):
    engine: dict[str, Any] = {**SMALL, "adapters": {"max_live": MAX_LIVE, "max_rank": 8}, **settings}
    async with running(family, tmp_path, monkeypatch, kv_cache_dtype=kv_cache, **engine) as one:
        base = await one.update(1, random_weights(one.config.model.path, 0))
        adapted = Adapted(one, base, is_fp8=True)
        await adapted.push("run-a", 1)
        await adapted.push("run-b", 2)
        names = ("run-a", "run-b", None)
        pairs = dict(zip(names, await asyncio.gather(*map(adapted.sample, names)), strict=True))  # in the same steps
    found = {(name, seed): adapted.difference(of, seed) for name, of in pairs.items() for seed in (1, 2, None)}
    record_property("mean_differences", {f"{name} {seed}": value for (name, seed), value in found.items()})
    for name, own in (("run-a", 1), ("run-b", 2), (None, None)):
        others = [found[name, seed] for seed in (1, 2, None) if seed != own]
        assert found[name, own] < MAX_RATIO * min(others), found


@pytest.mark.parametrize("quant", ["fp8_block", "none"])
async def test_a_trainers_adapted_layers_have_the_engines_results(quant, tmp_path, monkeypatch, record_property):
    engine: dict[str, Any] = {**SMALL, **EAGER, "adapters": {"max_live": MAX_LIVE, "max_rank": 8}}
    if quant == "none":
        del engine["linear_backend"]
    saved = tmp_path / "saved"
    saved.mkdir()
    async with running("qwen3", tmp_path, monkeypatch, quant=quant, **engine) as one:
        base = await one.update(1, random_weights(one.config.model.path, 0))
        plain, same = await unequal_numbers(Adapted(one, base, is_fp8=quant != "none"), saved, "cuda_eager")
    record_property("shares_of_unequal_numbers", {"by PEFT": plain, "imitated": same})
    assert len(same) == 8
    assert min(plain.values()) > 0.1
    assert max(same.values()) < 1e-2  # sums of another order: a number may round to its neighbour


@pytest.mark.parametrize("settings", [{}, EAGER], ids=["compiled", "eager"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_moe"])
async def test_a_trainer_with_an_adapter_has_the_engines_logprobs(
    family, settings, tmp_path, monkeypatch, record_property
):
    engine: dict[str, Any] = {**SMALL, "adapters": {"max_live": MAX_LIVE, "max_rank": 8}, **settings}
    async with running(family, tmp_path, monkeypatch, **engine) as one:
        plain, same = await differences(one, True, "cuda_eager" if settings else "cuda_compiled")
    record_property("mean_differences", {"as it is": plain, "imitated": same})
    assert plain > 3 * MEAN
    assert same < MEAN
