"""The service measures the scales of its FP8 KV cache by itself, and all replicas load the same."""

import pytest

from rollout_service.kv_scales.coordinator import read_result
from rollout_service.store.log import WeightLog
from tests.support.fp8_cache import CACHE_DTYPE, needs_fp8_cache
from tests.support.models import random_weights


@needs_fp8_cache
async def test_replicas_measure_a_version_and_store_one_result(service, client, next_version):
    weights, log = random_weights(service.config.model.path, seed=1), WeightLog(service.config.weights.root)
    for version in (next_version, next_version + 1):
        await client.push_weights(version, weights)
        status, result = await client.weights(version), read_result(log.folder(version))
        assert (status.state, status.kv_scales_from) == ("live", "calibrate")
        assert result is not None and result.error is None and result.scales is not None
        assert status.digest == log.manifest(version).digest  # scales that come later do not change it
        caches = {replica.replica_id: replica.kv_cache for replica in status.replicas}
        assert len(caches) == 2 and {cache.choice.dtype for cache in caches.values() if cache} == {"fp8_e4m3"}
        assert result.replica_id in {name for name, c in caches.items() if c and c.measured_version == version}


@pytest.mark.skipif(CACHE_DTYPE == "fp8_e4m3", reason="engines can have an FP8 KV cache here")
async def test_replicas_whose_engines_cannot_have_it_say_why(service, client, telltale):
    noted = WeightLog(service.config.weights.root).kv_cache()
    assert noted is not None and noted.dtype == "bfloat16" and "with AVX-512 or AMX, and this processor" in noted.why
    caches = [replica.kv_cache for replica in (await client.fleet()).replicas]
    assert len(caches) == 2 and all(cache is not None and cache.choice == noted for cache in caches)
    assert (await client.weights(telltale)).kv_scales_from == "unit"  # nothing is measured
