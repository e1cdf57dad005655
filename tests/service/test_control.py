"""Pause, resume, and the table of the fleet."""

import asyncio

import pytest

from rollout_service.client import RolloutClient
from rollout_service.errors import Asleep
from tests.support.telltale import assert_pure, canary_weights


async def test_a_paused_fleet_holds_requests_until_it_is_resumed(client):
    await client.pause()
    assert await client.is_paused()
    rollout = asyncio.create_task(client.generate([5, 6], max_tokens=4))
    while sum(replica.running for replica in (await client.fleet()).replicas) < 1:
        await asyncio.sleep(0.05)
    assert not rollout.done()
    assert all(replica.paused for replica in (await client.fleet()).replicas)
    await client.resume()
    assert len((await rollout).completions[0].token_ids) <= 4
    assert not await client.is_paused()


async def test_an_update_of_a_paused_fleet_lands_and_leaves_it_paused(service, client, telltale):
    await client.pause("wait")
    weights = canary_weights(service.config.model.path, telltale + 1)
    status = await client.push_weights(telltale + 1, weights)
    assert status.state == "live"
    assert await client.is_paused()
    await client.resume()
    completion = (await client.generate([5, 6], max_tokens=4, temperature=0.0)).completions[0]
    assert completion.versions == (telltale + 1,)
    assert_pure(completion)


async def test_the_fleet_table_lists_replicas_and_their_update_times(client, telltale):
    fleet = await client.fleet()
    assert fleet.latest_version == telltale and not fleet.paused
    assert len(fleet.replicas) == 2
    for replica in fleet.replicas:
        assert (replica.version, replica.state, replica.error) == (telltale, "ready", None)
        assert replica.update is not None and replica.update.closed_s >= replica.update.load_s > 0


async def test_a_sleeping_fleet_takes_pushes_and_wakes_to_the_newest(service, client, http, telltale):
    reply = await http.post("/release_memory_occupation")  # SGLang's route for /sleep
    assert (reply.status_code, reply.json()) == (200, None)
    assert await client.is_sleeping() and await client.health()
    fleet = await client.fleet()
    assert fleet.asleep and {(r.state, r.version) for r in fleet.replicas} == {("asleep", None)}
    rollout = asyncio.create_task(client.generate([5, 6], max_tokens=4, temperature=0.0))
    for version in (telltale + 1, telltale + 2):
        status = await client.push_weights(version, canary_weights(service.config.model.path, version))
        assert status.state == "committed"
    with pytest.raises(Asleep, match="POST /wake_up"):
        await client.resume()
    assert not rollout.done()
    await http.post("/resume_memory_occupation", json={"tags": ["cuda_graph"]})
    assert await client.is_sleeping()
    await http.post("/resume_memory_occupation", json={})
    assert not await client.is_sleeping() and not await client.is_paused()
    assert {(r.state, r.version) for r in (await client.fleet()).replicas} == {("ready", telltale + 2)}
    again = await client.generate([5, 6], max_tokens=4, temperature=0.0)
    for completion in ((await rollout).completions[0], again.completions[0]):
        assert completion.versions == (telltale + 2,)
        assert_pure(completion)


async def test_rollouts_that_a_sleep_holds_continue_on_the_weights_after_it(service, client, telltale):
    weights = canary_weights(service.config.model.path, telltale + 1)
    replicas = await ids(client)
    async with client.generate_stream([5, 6], max_tokens=1900, temperature=0.0, ignore_eos=True) as pieces:
        await anext(pieces)
        await client.sleep("keep")
        await client.sleep("wait")  # would let them finish, on memory that is released
        await client.push_weights(telltale + 1, weights, mode="wait")
        await client.wake_up()
        async for _ in pieces:
            pass
    [completion] = pieces.rollout.completions
    assert completion.versions == (telltale, telltale + 1)
    assert_pure(completion)
    assert await ids(client) == replicas


async def ids(client: RolloutClient) -> set[str]:
    return {replica.replica_id for replica in (await client.fleet()).replicas}
