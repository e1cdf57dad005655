"""The replicas of a service have the same KV cache, and say why."""

import pytest

from rollout_service.store.log import WeightLog
from tests.support.fp8_cache import CACHE_DTYPE, needs_fp8_cache


@needs_fp8_cache
async def test_replicas_with_accurate_keys_have_an_fp8_cache(client):
    caches = [replica.kv_cache for replica in (await client.fleet()).replicas]
    assert len(caches) == 2 and {cache.choice.dtype for cache in caches if cache} == {"fp8_e4m3"}
    assert [cache.measured_version for cache in caches if cache].count(None) <= 1


@pytest.mark.skipif(CACHE_DTYPE == "fp8_e4m3", reason="engines can have an FP8 KV cache here")
async def test_replicas_whose_engines_cannot_have_it_say_why(service, client):
    noted = WeightLog(service.config.weights.root).kv_cache()
    assert noted is not None and noted.dtype == "bfloat16" and "with AVX-512 or AMX, and this processor" in noted.why
    caches = [replica.kv_cache for replica in (await client.fleet()).replicas]
    assert len(caches) == 2 and all(cache is not None and cache.choice == noted for cache in caches)
