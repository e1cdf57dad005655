"""Replicas and the ingest die and come back; what was committed stays, and nothing stale is served."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import psutil
import pytest
from ray import serve
from ray.serve.schema import ApplicationStatus

from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError
from rollout_service.gateway.standby import proxy_answers
from rollout_service.local import LocalService
from rollout_service.protocol.fleet import Fleet
from rollout_service.protocol.rollout import Rollout
from rollout_service.serve_callbacks import HEALTH_PATH
from tests.support.processes import descendants
from tests.support.telltale import assert_pure, canary_weights

PROMPT = [5, 6, 7]
LENGTH = 100
EASED_S = 10.0
"""Between the rollouts of an eased load: an engine that computes takes the cores on which another one starts."""


def test_engines_are_not_bound_to_the_same_core(service):
    engines = descendants("VLLM::EngineCore")
    assert len(engines) == 2
    for engine in engines:
        assert engine.cpu_affinity() == psutil.Process().cpu_affinity()


async def test_a_kill_loses_no_request_and_its_successor_is_up_to_date(service, client, telltale):
    before = {replica.replica_id for replica in (await client.fleet()).replicas}
    newest = telltale + 1
    eased = asyncio.Event()
    async with _load(service, workers=12, eased=eased) as rollouts:
        await _on_each(client, 3)
        descendants("VLLM::EngineCore")[0].kill()  # of a replica that is killed: test_faults.py
        survivor = await _fleet(client, lambda fleet: len(_sound(fleet)) == 1)
        assert _sound(survivor) < before
        eased.set()  # the successor starts on the same cores
        await client.push_weights(newest, canary_weights(service.config.model.path, newest), wait="none")
        fleet = await _fleet(client, lambda fleet: len(_sound(fleet)) == 2)
        (newcomer,) = _sound(fleet) - before
        made_by_newcomer = [rollout async for rollout in _completions_of(client, newcomer)]
    for completion in made_by_newcomer:
        assert completion.versions == (newest,)
        assert_pure(completion)
    assert max(rollout.attempts for rollout in rollouts) == 2
    assert {completion.versions for rollout in rollouts for completion in rollout.completions} >= {(newest,)}
    for rollout in rollouts:
        assert len(rollout.completions[0].token_ids) == LENGTH
        assert_pure(rollout.completions[0])


async def test_a_restarted_ingest_finds_its_versions_and_replicas(service, client, telltale):
    (ingest,) = descendants("ray::ServeReplica:rollout:ingest")
    ingest.kill()
    rollout = await client.generate(PROMPT, max_tokens=4, temperature=0.0)
    assert_pure(rollout.completions[0])
    fleet = await _fleet(client, lambda fleet: len(_sound(fleet)) == 2)
    assert fleet.latest_version == telltale
    status = await client.push_weights(telltale + 1, canary_weights(service.config.model.path, telltale + 1))
    assert status.state == "live"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_a_dead_controller_is_restarted_and_keeps_every_replica(how, service, client, telltale):
    (controller,), before = descendants("ray::ServeController"), _replica_processes()
    controller.send_signal(how)
    await asyncio.to_thread(psutil.wait_procs, [controller])
    while (found := descendants("ray::ServeController")) in ([], [controller]):
        await asyncio.sleep(0.1)
    assert found != [controller]
    # Serve says so once it has looked at every replica that it found
    while (await asyncio.to_thread(serve.status)).applications["rollout"].status != ApplicationStatus.RUNNING:
        await asyncio.sleep(0.1)
    assert _replica_processes() == before
    rollouts = await client.generate_batch([PROMPT] * 8, max_tokens=4, temperature=0.0, min_weight_version=telltale)
    for rollout in rollouts:
        assert_pure(rollout.completions[0])


async def test_requests_are_answered_while_no_proxy_lives(service, client, http):
    await client.generate(PROMPT, max_tokens=4)  # the gateway asks the controller for the engines at its first request
    (controller,), (proxy,) = descendants("ray::ServeController"), descendants("ray::ProxyActor")
    controller.suspend()  # nobody starts another proxy
    try:
        proxy.terminate()
        await asyncio.to_thread(psutil.wait_procs, [proxy])
        while not descendants("ray::ProxyActor"):
            with suppress(RolloutServiceError):
                assert len((await client.generate(PROMPT, max_tokens=4)).completions[0].token_ids) == 4
                break
        else:
            pytest.fail("there is another proxy")
    finally:
        controller.resume()
    while not await proxy_answers(http, HEALTH_PATH):
        await asyncio.sleep(0.1)


def _replica_processes() -> set[int]:
    return {process.pid for process in descendants("ray::ServeReplica:rollout")}


@asynccontextmanager
async def _load(service: LocalService, workers: int, eased: asyncio.Event) -> AsyncIterator[list[Rollout]]:
    """Rollouts one after the other in each worker until the block ends; the client sends none of them twice.

    Once ``eased`` is set, one worker goes on, and waits after each.
    """
    rollouts: list[Rollout] = []
    done = asyncio.Event()

    async def work(client: RolloutClient, number: int) -> None:
        while not done.is_set() and not (eased.is_set() and number > 0):
            rollouts.append(await client.generate(PROMPT, max_tokens=LENGTH, temperature=0.0, ignore_eos=True))
            if eased.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(done.wait(), EASED_S)

    async with RolloutClient(service.url, retries=0) as client, asyncio.TaskGroup() as group:
        for number in range(workers):
            group.create_task(work(client, number))
        yield rollouts
        done.set()


async def _on_each(client: RolloutClient, sequences: int) -> None:
    """Wait until each replica has at least so many sequences."""
    while min(r.running for r in (await client.fleet()).replicas if r.version is not None) < sequences:
        await asyncio.sleep(0.05)


def _sound(fleet: Fleet) -> set[str]:
    return {replica.replica_id for replica in fleet.replicas if replica.error is None and replica.state == "ready"}


async def _fleet(client: RolloutClient, reached) -> Fleet:
    """The first table of the fleet for which ``reached`` holds; the service may be away for moments meanwhile."""
    while True:
        try:
            fleet = await client.fleet()
        except RolloutServiceError:
            fleet = None
        if fleet is not None and reached(fleet):
            return fleet
        await asyncio.sleep(0.2)


async def _completions_of(client: RolloutClient, replica_id: str, wanted: int = 3) -> AsyncIterator:
    """Completions made by one replica: the router spreads requests, so some of many are its."""
    found = 0
    while found < wanted:
        for rollout in await client.generate_batch([PROMPT] * 16, max_tokens=4, temperature=0.0):
            if rollout.replica_id == replica_id:
                found += 1
                yield rollout.completions[0]
