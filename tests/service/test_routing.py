"""Requests find the replica that they need."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from rollout_service.client import RolloutClient
from tests.support.processes import descendants
from tests.support.telltale import assert_pure, canary_weights

PROMPT = [5, 6, 7]


async def test_a_session_stays_on_one_replica_and_many_spread_to_all(client, http):
    async def replicas_of(session: str, header: bool) -> set[str]:
        found = set()
        for _ in range(4):
            if header:
                reply = await http.post(
                    "/inference/v1/generate",
                    json={"token_ids": PROMPT, "sampling_params": {"max_tokens": 8}},
                    headers={"X-Session-Id": session},
                )
                found.add(reply.json()["replica_id"])
            else:
                rollout = await client.generate(PROMPT, max_tokens=8, session_id=session)
                found.add(rollout.replica_id)
        return found

    sessions = await asyncio.gather(*(replicas_of(f"session-{i}", header=i % 2 == 0) for i in range(12)))
    assert [len(replicas) for replicas in sessions] == [1] * 12
    assert len(set.union(*sessions)) == 2
    assert await replicas_of("session-0", header=False) == sessions[0]


async def test_sequences_not_requests_are_spread(client):
    await client.pause()  # so that all are in flight at once
    large = asyncio.create_task(client.generate(PROMPT, n=20, max_tokens=2))
    await _running(client, 20)
    small = [asyncio.create_task(client.generate(PROMPT, max_tokens=2)) for _ in range(20)]
    await _running(client, 40)
    assert sorted(replica.running for replica in (await client.fleet()).replicas) == [20, 20]
    await client.resume()
    assert {(await rollout).replica_id for rollout in small}.isdisjoint({(await large).replica_id})


async def test_a_request_for_a_version_goes_to_a_replica_that_has_it(service, client, telltale):
    before = await client.generate_batch([PROMPT] * 8, max_tokens=2, temperature=0.0)
    new = telltale + 1
    async with _stopped(descendants("VLLM::EngineCore")[0]):
        await client.push_weights(new, canary_weights(service.config.model.path, new), wait="none")
        ahead = await _serving(client, new)
        rollouts = await client.generate_batch([PROMPT] * 24, max_tokens=4, temperature=0.0, min_weight_version=new)
        fleet = {replica.replica_id: replica.version for replica in (await client.fleet()).replicas}
        assert sorted(fleet.values()) == [telltale, new]
    assert {rollout.replica_id for rollout in before} == set(fleet)
    assert {rollout.replica_id for rollout in rollouts} == {ahead}
    for rollout in rollouts:
        assert rollout.completions[0].versions == (new,) and rollout.attempts == 1
        assert_pure(rollout.completions[0])
    await client.wait_live(new)


@asynccontextmanager
async def _stopped(process: psutil.Process) -> AsyncIterator[None]:
    """The process stands still."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


async def _serving(client: RolloutClient, version: int) -> str:
    """The first replica that serves ``version``."""
    while True:
        for replica in (await client.fleet()).replicas:
            if replica.version == version:
                return replica.replica_id
        await asyncio.sleep(0.05)


async def _running(client: RolloutClient, sequences: int) -> None:
    """Wait until so many sequences are in engines."""
    while sum(replica.running for replica in (await client.fleet()).replicas) < sequences:
        await asyncio.sleep(0.05)
