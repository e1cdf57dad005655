"""The ingest keeps the dtype of all replicas' KV caches."""

import asyncio
import errno

import pytest

from rollout_service.errors import InsufficientStorage, LogCorrupt
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.store.log import WeightLog
from tests.unit.ingest.trainer import started

FP8 = KVCacheChoice(dtype="fp8_e4m3", why="accurate enough for all layers", judged_by="a, version 0")
BF16 = KVCacheChoice(dtype="bfloat16", why="not for 2 layers", judged_by="b, version 0")


async def test_the_first_choice_holds_for_all_and_over_a_restart(ingest, config):
    assert ingest.kv.kv_cache_choice() is None
    answers = await asyncio.gather(ingest.kv.choose_kv_cache(FP8), ingest.kv.choose_kv_cache(BF16))
    assert answers == [FP8, FP8] and ingest.kv.kv_cache_choice() == FP8
    await ingest.stop()
    async with started(config) as again:
        assert again.kv.kv_cache_choice() == FP8 and await again.kv.choose_kv_cache(BF16) == FP8


async def test_fp8_asked_for_by_name_takes_the_place_of_bf16(config, log):
    by_name = config.kv_cache.model_copy(update={"dtype": "fp8_e4m3"})
    async with started(config.model_copy(update={"kv_cache": by_name})) as ingest:
        log.set_kv_cache(BF16)
        assert await ingest.kv.choose_kv_cache(FP8) == FP8 and log.kv_cache() == FP8


async def test_a_choice_that_the_disk_refuses_holds_for_nobody(ingest, log, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(WeightLog, "set_kv_cache", full)
        with pytest.raises(InsufficientStorage, match="choice of the KV cache's dtype cannot be kept"):
            await ingest.kv.choose_kv_cache(FP8)
    assert ingest.kv.kv_cache_choice() is None and await ingest.kv.choose_kv_cache(FP8) == FP8


async def test_an_ingest_does_not_start_on_a_torn_choice(ingest, config, log):
    await ingest.kv.choose_kv_cache(FP8)
    await ingest.stop()
    (log.root / "KV_CACHE").write_text("{")
    with pytest.raises(LogCorrupt, match="KV_CACHE"):
        await Ingest(config).start()
