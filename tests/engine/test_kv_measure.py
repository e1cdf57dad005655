"""The engine that serves measures the scales of its FP8 KV cache as a trainer does, on every rank."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_service.errors import KVCacheUnfit
from rollout_service.kv_scales import KVScales, scales_from_amax
from rollout_service.kv_scales.cache_choice import CacheChooser
from rollout_service.kv_scales.fp8_error import unfit_layers, worst_errors
from rollout_service.kv_scales.observer import observe_qkv
from rollout_service.kv_scales.scales import largest_of_ranks
from tests.support.fp8_cache import needs_fp8_cache
from tests.support.key_channels import loud_weights, uneven_weights
from tests.support.kv_scales import assert_held
from tests.support.one_engine import OneEngine, running
from tests.support.one_engine import mean_difference as logprob_difference
from tests.support.reference import reference_model

LAYERS = [f"model.layers.{layer}.self_attn" for layer in range(2)]
BATCH = [[(7 * i + 3 * j) % 120 + 5 for j in range(40 + 5 * i)] for i in range(8)]
# The engine computes in BF16, the reference in fp32: largest values agree to one rounding of BF16, 1/256, and what
# two layers add to it.
AGREE = 0.02
# Mean |Δ| of logprobs from the fp32 reference with an exact cache, as in test_kv_scales.py
CALIBRATED_MEAN = 0.035


def measured_by_a_trainer(one: OneEngine, folder: Path, measured_with: KVScales | None = None) -> Any:
    model = reference_model(one.config.model.path, folder, fp8_activations=False, fp8_kv=False)
    with torch.no_grad(), observe_qkv(model, measured_with=measured_with) as observation:
        for sequence in BATCH:
            model(torch.tensor([sequence]))
    return observation


def require_alike(ranks: list[Any], observed: Any, agree: float) -> None:
    """The largest values that an engine's ranks and a trainer have seen are relatively that far from each other."""
    mine, trainers = largest_of_ranks(ranks), largest_of_ranks([observed.amax()])
    assert mine.keys() == trainers.keys()
    for layer, amax in mine.items():
        assert amax.tolist() == pytest.approx(trainers[layer].tolist(), rel=agree), layer


@needs_fp8_cache
@pytest.mark.asyncio(loop_scope="session")
async def test_an_engine_measures_as_a_trainer_and_refuses_uneven_keys(llama_with_fp8_cache):
    one = llama_with_fp8_cache
    folder = await one.update(one.newest + 1, loud_weights(one.config.model.path, seed=1))
    before = await one.logprobs([tuple(BATCH[0])])
    ranks = await one.measured(BATCH)
    assert torch.equal(await one.logprobs([tuple(BATCH[0])]), before)

    observed = measured_by_a_trainer(one, folder)
    trainer = observed.scales()
    assert ranks[0].tokens == sum(map(len, BATCH))
    require_alike([rank.amax for rank in ranks], observed, AGREE)

    # the errors, too: against scales of 1, which the engine has, most keys saturate; against the trainer's, none
    unit = worst_errors(ranks)
    assert all(unit[layer].k_saturated > 0.5 and unit[layer].v_saturated == 0 for layer in LAYERS)
    with_scales = worst_errors(await one.measured(BATCH, trainer.named()))
    expected = measured_by_a_trainer(one, folder, trainer).errors()
    assert unfit_layers(with_scales) == {}
    for layer in LAYERS:
        for name in ("k_relative", "v_relative", "k_channel_relative", "v_channel_relative", "logit_rms"):
            found, wanted = getattr(with_scales[layer], name), getattr(expected[layer], name)
            assert found == pytest.approx(wanted, rel=0.1), (layer, name)

    folder = await one.update(one.newest + 1, uneven_weights(one.config.model.path, seed=1))
    chooser = CacheChooser("r1", one.engine, None, BATCH, choice=None, retry_s=1, falls_back=True)
    await one.engine.pause("keep")
    with pytest.raises(KVCacheUnfit, match=r"FP8 is not accurate enough .* 2 of 2 layers.*k_channel_relative"):
        await chooser.loaded(one.newest, None)
    await one.engine.resume()


@needs_fp8_cache
@pytest.mark.slow  # as all engines of two ranks
async def test_two_ranks_measure_their_heads_and_hold_the_same_scales(tmp_path, monkeypatch):
    first, second, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")  # vLLM wants a NUMA node for each rank else
    parallel: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "tensor_parallel_size": 2}
    async with running("llama", tmp_path, monkeypatch, quant="none", **parallel) as one:
        assert await difference_with_scales_of_two_ranks(one, AGREE, fp8=False) < CALIBRATED_MEAN


async def difference_with_scales_of_two_ranks(one: OneEngine, agree: float, fp8: bool) -> float:
    """Each rank measures its own heads, and both hold the same scales, a trainer's; then as ``mean_difference``.

    ``agree``: how far the largest values may be from a trainer's, relatively. ``fp8``: the weights are.
    """
    weights = loud_weights(one.config.model.path, seed=1)
    folder = await one.update(1, weights)
    ranks = await one.measured(BATCH)
    assert len(ranks) == 2 and ranks[0].amax != ranks[1].amax
    amax = [rank.amax for rank in ranks]
    trainer = measured_by_a_trainer(one, folder)
    require_alike(amax, trainer, agree)
    scales = scales_from_amax(amax).named()
    if not fp8:  # else one may fall on either side of a power of two
        assert scales == trainer.scales().named()
    folder = await one.update(2, weights, scales)
    first, second = await one.kv_scales_of_ranks()
    assert first == second
    assert_held(first, scales)
    return await logprob_difference(one, folder, fp8=fp8)
