"""Logprobs of target tokens, which only vLLM's runner for GPUs computes."""

from itertools import pairwise

import pytest

from rollout_service.protocol.sampling import Sampling, Scoring
from tests.support.models import random_weights
from tests.support.one_engine import running

PROMPT = tuple(range(3, 40))
START, TOP = 10, 4


async def test_target_tokens_have_the_logprobs_of_the_top(tmp_path, monkeypatch):
    async with running("qwen3", tmp_path, monkeypatch, linear_backend="cutlass", gpu_memory_utilization=0.2) as one:
        await one.update(1, random_weights(one.config.model.path, seed=1))
        asked = Sampling(max_tokens=1, ignore_eos=True, prompt_logprobs=TOP)
        [top] = await one.engine.generate("top", PROMPT, asked, scoring=Scoring(start=START))
        assert top.scores is not None
        ids, logprobs = top.scores.unpacked()
        rows = [tuple(ids[a:b].tolist()) for a, b in pairwise(top.scores.offsets)]
        rows[1] = rows[1][:2]  # rows may have different lengths
        scoring = Scoring(start=START, target_token_ids=tuple(rows))
        [targets] = await one.engine.generate("targets", PROMPT, Sampling(max_tokens=1), scoring=scoring)
    assert targets.scores is not None
    found_ids, found = targets.scores.unpacked()
    kept = [*range(TOP + 3), *range(2 * (TOP + 1), len(ids))]
    assert found_ids.tolist() == ids[kept].tolist()
    assert found.tolist() == pytest.approx(logprobs[kept].tolist(), abs=1e-3)
