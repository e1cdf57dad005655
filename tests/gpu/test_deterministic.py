"""``engine.deterministic``: two runs and two batch compositions give the same bits on a GPU."""

import asyncio

import pytest

from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling
from tests.support.models import random_weights
from tests.support.one_engine import OneEngine, running

PROMPTS = [tuple(3 + (i * j) % 100 for j in range(5 + 7 * i)) for i in range(1, 17)]
Sampled = list[tuple[tuple[int, ...], tuple[float, ...]]]


async def sampled(one: OneEngine, index: int, name: str) -> tuple[Completion, ...]:
    sampling = Sampling(max_tokens=32, ignore_eos=True, seed=index)
    return await one.engine.generate(f"{name}-{index}", PROMPTS[index], sampling, cache_salt=name)


def bits(made: list[tuple[Completion, ...]]) -> Sampled:
    return [(each.token_ids, each.logprobs) for (each,) in made]


@pytest.mark.parametrize("quant", ["none", "fp8_block"])
async def test_runs_and_batches_agree_bit_for_bit(quant, tmp_path, monkeypatch):
    runs: list[Sampled] = []
    for run in range(2):
        settings = {"deterministic": True, "linear_backend": "cutlass", "gpu_memory_utilization": 0.2}
        async with running("qwen3", tmp_path / str(run), monkeypatch, quant=quant, **settings) as one:
            await one.update(1, random_weights(one.config.model.path, seed=1))
            together = await asyncio.gather(*(sampled(one, i, "together") for i in range(len(PROMPTS))))
            alone = [await sampled(one, i, "alone") for i in range(len(PROMPTS))]
            runs += [bits(together), bits(alone)]
    assert all(run == runs[0] for run in runs)
