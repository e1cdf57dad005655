"""Scales of an FP8 KV cache travel with a version into a real engine, and its logprobs follow them."""

import asyncio
from pathlib import Path

import pytest
import torch

from rollout_service.errors import EngineFailed
from rollout_service.kv_scales.observer import observe_qkv
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import MANIFEST_FILE
from tests.support.fp8_cache import needs_fp8_cache
from tests.support.key_channels import loud_weights
from tests.support.kv_scales import assert_held, some_scales
from tests.support.models import random_weights
from tests.support.one_engine import PROMPTS, OneEngine, mean_difference
from tests.support.reference import reference_model

# Bounds on the mean of |Δ|, the difference of a token's logprob from the fp32 reference with an exact cache. Weights
# and activations are BF16, which alone gives 0.01 (tests/engine/test_engine.py); the cache's rounding comes on top.
CALIBRATED_MEAN, UNIT_MEAN = 0.035, 0.1
# Of an engine's logprobs, token by token while it samples, from those that a fresh engine gives all of them at once. On
# the machine where this was written they are equal bit for bit; another may add in another order, which is BF16's 0.01.
FRESH_MEAN, FRESH_MAX = 0.01, 0.1


def calibrated(one: OneEngine, folder: Path) -> dict[str, float]:
    """What a trainer measures on the prompts with the weights of a version."""
    model = reference_model(one.config.model.path, folder, fp8_activations=False, fp8_kv=False)
    with torch.no_grad(), observe_qkv(model) as observation:
        for prompt in PROMPTS:
            model(torch.tensor([prompt]))
    return observation.scales().named()


async def long_rollouts(one: OneEngine) -> list[asyncio.Task[tuple[Completion, ...]]]:
    """Two completions of 220 tokens for each prompt, all under way."""
    sampling = Sampling(n=2, max_tokens=220, temperature=1.0, ignore_eos=True)
    tasks = [asyncio.create_task(one.engine.generate(f"long{i}", p, sampling)) for i, p in enumerate(PROMPTS)]
    while one.engine.scheduler.load(1, 0).running < 2 * len(PROMPTS):
        await asyncio.sleep(0.01)
    return tasks


async def rescored(one: OneEngine, completions: list[tuple[tuple[int, ...], Completion]], version: int) -> torch.Tensor:
    """The engine's logprobs of the tokens of ``version``, given all before them, minus those they came with."""
    differences = []
    for prompt, completion in completions:
        again = (await one.logprobs([prompt + completion.token_ids]))[len(prompt) - 1 :]
        [span] = [span for span in completion.spans if span.version == version]
        differences.append((again - torch.tensor(completion.logprobs))[span.start : span.end])
    return torch.cat(differences)


@needs_fp8_cache
@pytest.mark.asyncio(loop_scope="session")
async def test_logprobs_follow_the_scales_of_each_spans_version(llama_with_fp8_cache):
    one = llama_with_fp8_cache
    weights = loud_weights(one.config.model.path, seed=1)
    folder = await one.update(one.newest + 1, weights)
    assert_held(await one.kv_scales(), dict.fromkeys(some_scales(1), 1.0))
    saturated = await mean_difference(one, folder, fp8=False)

    scales = calibrated(one, folder)
    assert all(scale > 2 for name, scale in scales.items() if name.endswith("k_scale"))
    before, after = one.newest, one.newest + 1
    folder = await one.commit(after, weights, scales)
    tasks = await long_rollouts(one)
    await one.load(folder, after)
    exact = await mean_difference(one, folder, fp8=False)
    assert exact < CALIBRATED_MEAN and saturated > UNIT_MEAN, (exact, saturated)

    rollouts = [await task for task in tasks]
    completions = [(p, c) for p, rollout in zip(PROMPTS, rollouts, strict=True) for c in rollout]
    assert all([span.version for span in c.spans] == [before, after] for _, c in completions)
    # read again, in a cache that the update emptied
    difference = (await rescored(one, completions, version=after)).abs()
    assert difference.mean() < FRESH_MEAN and difference.max() < FRESH_MAX, (difference.mean(), difference.max())
    # and that tells right from wrong: the tokens that the version before made
    assert (await rescored(one, completions, version=before)).abs().mean() > 5 * FRESH_MEAN


@needs_fp8_cache
@pytest.mark.asyncio(loop_scope="session")
async def test_scales_are_reused_and_never_incomplete(llama_with_fp8_cache):
    """The last test of this engine: it is of no use afterwards. With experts, over many updates: test_round_trip.py."""
    one = llama_with_fp8_cache
    weights, scales = random_weights(one.config.model.path, seed=1), some_scales(20)
    await one.update(one.newest + 1, weights, scales)
    assert_held(await one.kv_scales(), scales)
    folder = await one.update(one.newest + 1, random_weights(one.config.model.path, seed=2))
    assert_held(await one.kv_scales(), scales)
    manifest = WeightLog(one.config.weights.root).manifest(one.newest)
    assert (manifest.kv_scales, manifest.kv_scales_from) == (scales, "reuse")
    await one.load(folder, one.newest)
    assert (await one.load_report())["kv_scales"] == 0

    # a layer without scales would keep those of another version: such a version is never served
    kept = {name: scale for name, scale in scales.items() if ".1.self_attn.v" not in name}
    (folder / MANIFEST_FILE).write_bytes(manifest.replace(kv_scales=kept).to_json())
    with pytest.raises(
        EngineFailed, match=r"5 KV scales, not the 6 .* missing \['model\.layers\.1\.self_attn\.v_scale"
    ):
        await one.load(folder, one.newest + 1)
