"""One engine follows a trainer while another one is pinned to a version for evaluation."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout_service.client import RolloutClient
from rollout_service.errors import VersionNotServed
from rollout_service.protocol.fleet import Fleet, Pin
from tests.support.own_service import own_service
from tests.support.telltale import assert_pure, canary_weights

PROMPT = [5, 6, 7, 9, 11]


@pytest.fixture
async def model(tmp_path: Path) -> Path:
    return tmp_path / "tiny-qwen3"


@pytest.fixture
async def client(tmp_path: Path, model: Path) -> AsyncIterator[RolloutClient]:
    overrides = {
        "model": {"path": str(model)},
        "scaling": {"groups": {"eval": {"version": "golden"}}},
        "weights": {"root": str(tmp_path / "log"), "poll_s": 1.0, "dead_after_s": 5.0},
    }
    async with own_service(overrides) as (url, _), RolloutClient(url) as client:
        yield client


async def test_group_serves_its_version_beside_training(client, model):
    async def push(version: int, label: str | None = None) -> None:
        await client.push_weights(version, canary_weights(model, version), label=label)

    async def versions(count: int, **options: object) -> set[tuple[int, ...]]:
        rollouts = await client.generate_batch([PROMPT] * count, max_tokens=4, temperature=0.0, **options)
        for rollout in rollouts:
            assert_pure(rollout.completions[0])
        return {rollout.completions[0].versions for rollout in rollouts}

    await push(1, "golden")
    await push(2)
    await _until_served(client, 1)
    for version in (3, 4):
        await push(version)  # returns although the group does not load it
        assert await versions(16) == {(version,)}
        assert await versions(4, min_weight_version=version) == {(version,)}
        assert await versions(4, weight_version={"exact_version": 1}) == {(1,)}
        assert await versions(4, weight_version={"exact_version": "golden"}) == {(1,)}
    fleet = await client.fleet()
    assert fleet.groups == {"eval": Pin(pinned_to="golden", version=1)} and fleet.latest_version == 4
    assert {replica.group: replica.version for replica in fleet.replicas} == {None: 4, "eval": 1}
    with pytest.raises(VersionNotServed, match="exact_version=2") as refused:
        await client.generate(PROMPT, weight_version={"exact_version": 2})
    assert sorted(refused.value.detail["live"].values()) == [1, 4]
    running = asyncio.create_task(
        client.generate(PROMPT, max_tokens=400, ignore_eos=True, temperature=0.0, weight_version={"exact_version": 1})
    )
    await _until(client, lambda fleet: any(r.group == "eval" and r.running for r in fleet.replicas))
    await push(5, "golden")
    await _until(client, lambda fleet: _version(fleet) == 5)
    [completion] = (await running).completions
    assert completion.versions == (1,) and completion.finish_reason in ("abort", "length")
    assert (await client.fleet()).groups == {"eval": Pin(pinned_to="golden", version=5)}
    assert await versions(4, weight_version={"exact_version": "golden"}) == {(5,)}
    with pytest.raises(VersionNotServed):
        await client.generate(PROMPT, weight_version={"exact_version": 1})


async def _until_served(client: RolloutClient, version: int) -> None:
    """Repeat a request as its refusals ask for."""
    while True:
        try:
            await client.generate(PROMPT, max_tokens=1, weight_version={"exact_version": version})
            return
        except VersionNotServed as refusal:
            await asyncio.sleep(refusal.retry_after_s or 0)


def _version(fleet: Fleet) -> int | None:
    return next((replica.version for replica in fleet.replicas if replica.group == "eval"), None)


async def _until(client: RolloutClient, reached: object) -> None:
    assert callable(reached)
    async with asyncio.timeout(120):
        while not reached(await client.fleet()):
            await asyncio.sleep(0.1)
