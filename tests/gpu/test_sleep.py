"""An engine on a GPU gives its memory back, and holds a version's exact bytes after it has taken it again."""

import pytest
import torch

from tests.gpu.held import require_held
from tests.support.models import random_weights
from tests.support.one_engine import KV_CACHE_BYTES, running

PROMPTS = [tuple(range(3 + i, 60 + 2 * i)) for i in range(8)]
SETTINGS = {"linear_backend": "cutlass", "gpu_memory_utilization": 0.1, "enable_sleep_mode": True}


@pytest.mark.parametrize("staging", ["device", "host", "none"])
@pytest.mark.parametrize(
    ("family", "kv_cache", "eager"),
    [("qwen3", "fp8_e4m3", False), ("qwen3_moe", "fp8_e4m3", False), ("qwen2", "bfloat16", True)],
)
async def test_an_engine_that_slept_computes_as_before(family, kv_cache, eager, staging, tmp_path, monkeypatch):
    settings = SETTINGS | {"kv_cache_dtype": kv_cache, "enforce_eager": eager, "staging": staging}
    async with running(family, tmp_path, monkeypatch, **settings) as one:
        folders = [await one.update(version, random_weights(one.config.model.path, seed=version)) for version in (1, 2)]
        held, scored = await one.digests(), await one.logprobs(PROMPTS)
        assert await one.sleep_and_wake(folders[1], 2) >= KV_CACHE_BYTES
        assert await one.digests() == held
        assert torch.equal(await one.logprobs(PROMPTS), scored)
        # again, for another version
        weights = random_weights(one.config.model.path, seed=3)
        assert await one.sleep_and_wake(await one.commit(3, weights), 3) >= KV_CACHE_BYTES
        await require_held(one, weights)
        assert not torch.equal(await one.logprobs(PROMPTS), scored)
