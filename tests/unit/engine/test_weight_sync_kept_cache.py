"""Which updates keep an engine's KV cache."""

import pytest
from msgspec.structs import replace

from rollout_service.errors import NotReady
from tests.unit.engine.fakes import push_until_served, serving
from tests.unit.store.versions import commit, restored, stage

CLEARS = ["pause keep", "load 1", "resume"]
KEEPS = ["pause keep and keep the cache", "load 1 and keep the cache", "resume"]


@pytest.fixture
async def keeping(started):
    return await started(weights={"kv_cache_on_update": "keep"})


@pytest.mark.parametrize(("policy", "calls"), [("drop", CLEARS), ("keep", KEEPS)])
async def test_an_update_drops_or_keeps_the_cache_by_policy(started, log, engine, ingest, policy, calls):
    weight_sync = await started(weights={"kv_cache_on_update": policy})
    await push_until_served(weight_sync, log, ingest, 1)
    assert engine.calls == calls


async def test_other_kv_scales_drop_the_cache(keeping, log, engine, ingest, caplog):
    for version in (1, 2):
        scaled = replace(stage(log, version), kv_scales={"l.0.k_scale": 2.0}, kv_scales_from="trainer")
        log.commit(scaled, "keep")
        await ingest.change(version=version)
        await serving(keeping, ingest, version)
    assert engine.calls == [*CLEARS, "pause keep and keep the cache", "load 2 and keep the cache", "resume"]
    assert "version 1 drops the KV cache" in caplog.text and "version 2" not in caplog.text


@pytest.mark.parametrize("newest", [2, 3])
async def test_rollback_drops_the_cache(newest, keeping, log, engine, ingest):
    await push_until_served(keeping, log, ingest, 1)
    engine.calls.clear()
    log.commit(replace(stage(log, 2), rollback_of=0), "keep")
    for version in range(3, newest + 1):  # of which the replica hears only the newest
        commit(log, version)
    await ingest.change(version=newest)
    await serving(keeping, ingest, newest)
    assert engine.new_calls() == ["pause keep", f"load {newest}", "resume"]
    await push_until_served(keeping, log, ingest, 4)
    assert engine.calls == ["pause keep and keep the cache", "load 4 and keep the cache", "resume"]


@pytest.mark.parametrize("newest", [0, 2])
async def test_restored_log_drops_the_cache(keeping, log, engine, ingest, newest):
    with restored(log):
        await push_until_served(keeping, log, ingest, 1)
        engine.calls.clear()
    if newest:
        commit(log, 1, content=7)  # of which the replica does not hear
        commit(log, newest)
    await ingest.change(version=newest)
    await serving(keeping, ingest, newest)
    assert engine.new_calls() == ["pause keep", f"load {newest}", "resume"]
    await push_until_served(keeping, log, ingest, 3)
    assert engine.calls == ["pause keep and keep the cache", "load 3 and keep the cache", "resume"]


async def test_wake_up_loads_without_a_cache(keeping, log, engine, ingest):
    await ingest.change(paused=True, pause_mode="keep", asleep=True, clear_cache=False)
    await ingest.reported(lambda s: s.state == "asleep")
    commit(log, 1)
    await ingest.change(version=1, paused=False, asleep=False)
    await serving(keeping, ingest, 1)
    assert engine.calls[-3:] == CLEARS and "wake up" in engine.calls


class Ages:
    """Answers with the version's number, or not at all."""

    error: NotReady | None = None

    async def kv_max_age(self, version: int) -> int:
        if self.error is not None:
            raise self.error
        return version


async def test_auto_bounds_the_age_before_each_kept_update(started, log, engine, ingest, caplog):
    ages = Ages()
    weight_sync = await started(weights={"kv_cache_on_update": "keep", "kv_max_age": "auto"}, kv_ages=ages)
    await push_until_served(weight_sync, log, ingest, 1)
    assert engine.new_calls() == ["bound age 1", *KEEPS]
    ages.error = NotReady("the monitor is being replaced")
    await push_until_served(weight_sync, log, ingest, 2)
    assert "bound age 2" not in engine.calls and "resume" in engine.calls
    assert "stays for version 2: the monitor does not answer" in caplog.text
