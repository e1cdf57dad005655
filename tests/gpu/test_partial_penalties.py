"""Penalties of a completion that goes on, with vLLM's Model Runner V2 and CUDA graphs.

Of the CPU's V1 the same is tested in ``tests/engine/test_engine.py``.
"""

from tests.support.models import random_weights
from tests.support.one_engine import PROMPTS, running
from tests.support.penalties import whole_with

BF16_MEAN, BF16_MAX = 0.02, 0.15
"""|Δ| in nats of prompts and decoded tokens, whose kernels round otherwise: as tests/engine/test_engine.py has it."""
ALL = {"presence_penalty": -1.0, "frequency_penalty": 0.3, "repetition_penalty": 1.4}
KINDS = ({"presence_penalty": 1.5, "frequency_penalty": 0.7}, ALL, {"repetition_penalty": 1.4})


async def test_they_are_those_of_one_that_was_not_cut(tmp_path, monkeypatch):
    async with running("qwen3", tmp_path, monkeypatch, quant="none", gpu_memory_utilization=0.1) as one:
        await one.update(1, random_weights(one.config.model.path, seed=1))
        for penalties in KINDS:
            cuts = await whole_with(one.engine, PROMPTS[1] * 2, penalties)
            gone_on = await cuts.differences(counted=True)
            assert gone_on.numel() > 1500
            assert gone_on.mean() < BF16_MEAN and gone_on.max() < BF16_MAX
            if len(penalties) > 1:  # the repetition penalty alone counts the prompt's tokens, and so these, by itself
                assert (await cuts.differences(counted=False)).mean() > 3 * BF16_MEAN
