"""Replicas come with load and go with it, and serve nothing but the newest version."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_service.client import RolloutClient
from rollout_service.protocol.fleet import Fleet
from rollout_service.protocol.rollout import Rollout
from tests.support.own_service import own_service
from tests.support.processes import descendants
from tests.support.telltale import assert_pure, canary_weights

pytestmark = pytest.mark.timeout(900)
PROMPT = [5, 6, 7]


def overrides(folder: Path, **scaling: Any) -> dict[str, dict[str, Any]]:
    return {
        "model": {"path": str(folder / "tiny-qwen3")},
        "weights": {"root": str(folder / "weights"), "poll_s": 1.0, "dead_after_s": 5.0},
        "scaling": scaling,
    }


async def test_a_replica_added_by_load_serves_only_the_newest_version(tmp_path):
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_sequences": 8, "upscale_delay_s": 0}
    async with own_service(overrides(tmp_path, **scaling)) as (url, _), RolloutClient(url) as client:
        (first,) = (await client.fleet()).replicas
        await client.push_weights(1, canary_weights(tmp_path / "tiny-qwen3", 1))
        rollouts: list[Rollout] = []
        async with asyncio.TaskGroup() as group:
            load = group.create_task(generate_for_ever(client, rollouts))
            while len(descendants("VLLM::EngineCore")) < 2:
                await asyncio.sleep(0.2)
            await client.push_weights(2, canary_weights(tmp_path / "tiny-qwen3", 2))
            await reached(client, lambda fleet: len(fleet.replicas) == 2)
            while len({rollout.replica_id for rollout in rollouts}) < 2:
                await asyncio.sleep(0.2)
            load.cancel()
        by_newcomer = [r.completions[0] for r in rollouts if r.replica_id != first.replica_id]
        assert by_newcomer and all(completion.versions == (2,) for completion in by_newcomer)
        for rollout in rollouts:
            assert_pure(rollout.completions[0])


async def test_a_fleet_at_zero_takes_a_version_and_wakes_for_a_request(tmp_path):
    scaling = {"min_replicas": 0, "max_replicas": 1, "downscale_delay_s": 5}
    async with own_service(overrides(tmp_path, **scaling)) as (url, _), RolloutClient(url) as client:
        await reached(client, lambda fleet: not fleet.replicas)
        status = await client.push_weights(1, canary_weights(tmp_path / "tiny-qwen3", 1))
        assert status.replicas == ()
        rollout = await client.generate(PROMPT, max_tokens=8, temperature=0.0)
        assert rollout.completions[0].versions == (1,)
        assert_pure(rollout.completions[0])


async def test_a_batch_waits_for_a_fleet_that_scales_up_from_zero(tmp_path):
    scaling = {
        "min_replicas": 0,
        "max_replicas": 2,
        "target_sequences": 8,
        "upscale_delay_s": 0,
        "downscale_delay_s": 5,
    }
    settings = overrides(tmp_path, **scaling) | {"engine": {"admission_limit": 16}}
    async with own_service(settings) as (url, _), RolloutClient(url, retries=0) as client:
        await reached(client, lambda fleet: not fleet.replicas)
        served, both = set[str](), asyncio.Event()

        async def agent() -> None:
            while not both.is_set():
                served.add((await client.generate(PROMPT, n=4, max_tokens=64, ignore_eos=True)).replica_id)
                if len(served) == 2:
                    both.set()

        async with asyncio.TaskGroup() as group:
            for _ in range(40):
                group.create_task(agent())
        assert both.is_set()


async def generate_for_ever(client: RolloutClient, rollouts: list[Rollout]) -> None:
    """Keep 32 sequences under way."""
    while True:
        rollouts += await client.generate_batch([PROMPT] * 32, max_tokens=128, temperature=0.0, ignore_eos=True)


async def reached(client: RolloutClient, condition) -> Fleet:
    """The first table of the fleet for which ``condition`` holds."""
    while not condition(fleet := await client.fleet()):
        await asyncio.sleep(0.2)
    return fleet
