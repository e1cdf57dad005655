"""A weight update reaches every replica, and every token names the weights that made it."""

import asyncio

import pytest

from rollout_service.client import RolloutClient
from rollout_service.errors import TooEarly
from tests.support.telltale import assert_pure, canary_weights, token_of

PROMPT = [5, 6, 7, 9, 11]
LONG_PROMPT = PROMPT * 60
"""Longer than two blocks of the prefix cache."""


async def test_after_a_push_every_replica_serves_only_the_new_version(client, telltale):
    rollouts = await client.generate_batch([PROMPT] * 32, max_tokens=8, temperature=0.0)
    for completion in (c for rollout in rollouts for c in rollout.completions):
        assert completion.versions == (telltale,)
        assert_pure(completion)
    replicas = {replica.replica_id for replica in (await client.fleet()).replicas}
    assert {rollout.replica_id for rollout in rollouts} <= replicas and len(replicas) == 2


async def test_mode_keep_splits_completions_into_old_and_new_weights(service, client, telltale):
    new = telltale + 1
    rollouts = [
        asyncio.create_task(client.generate(PROMPT, max_tokens=800, temperature=0.0, ignore_eos=True)) for _ in range(8)
    ]
    await _running(client, 8)
    status = await client.push_weights(new, canary_weights(service.config.model.path, new), mode="keep")
    assert status.state == "live"
    completions = [(await rollout).completions[0] for rollout in rollouts]
    for completion in completions:
        assert len(completion.token_ids) == 800
        assert_pure(completion)
    split = [completion for completion in completions if len(completion.spans) == 2]
    assert split, f"no completion was under way: {[c.spans for c in completions]}"
    assert all(completion.versions == (telltale, new) for completion in split)


async def test_mode_wait_finishes_running_completions_on_old_weights(service, client, telltale):
    new = telltale + 1
    rollout = asyncio.create_task(client.generate(PROMPT, max_tokens=200, temperature=0.0, ignore_eos=True))
    await _running(client, 1)
    await client.push_weights(new, canary_weights(service.config.model.path, new), mode="wait")
    completion = (await rollout).completions[0]
    assert completion.versions == (telltale,)
    assert completion.finish_reason == "length"
    assert_pure(completion)


async def test_mode_abort_continues_running_completions_on_new_weights(service, client, telltale):
    new = telltale + 1
    going = [
        # long enough to be under way still when the version is there, on a busy machine, too
        asyncio.create_task(client.generate(PROMPT, n=n, max_tokens=1000, temperature=t, seed=7, ignore_eos=True))
        for n, t in ((1, 0.0), (3, 0.01))
    ]
    await _running(client, 4)
    await client.push_weights(new, canary_weights(service.config.model.path, new), mode="abort")
    for rollout in await asyncio.gather(*going):
        # where one measures KV scales for the other, replicas come to a version one by one: both may abort it
        assert rollout.attempts in (2, 3)
        for completion in rollout.completions:
            assert completion.finish_reason == "length" and len(completion.token_ids) == 1000
            assert completion.versions == (telltale, new)
            tokens = {span.version: set(completion.token_ids[span.start : span.end]) for span in completion.spans}
            assert tokens == {telltale: {token_of(telltale)}, new: {token_of(new)}}
    assert_pure((await going[0]).completions[0])


async def test_an_aborted_completion_is_returned_as_is_when_asked_for(service, client, telltale):
    new = telltale + 1
    rollout = asyncio.create_task(
        client.generate(PROMPT, max_tokens=1900, temperature=0.0, ignore_eos=True, on_abort="return")
    )
    await _running(client, 1)
    await client.push_weights(new, canary_weights(service.config.model.path, new), mode="abort")
    completion = (await rollout).completions[0]
    assert completion.finish_reason == "abort" and (await rollout).attempts == 1
    assert len(completion.token_ids) < 1900
    assert_pure(completion)


async def test_many_updates_under_load_never_leave_a_stale_token(service, client, telltale):
    async def keep_generating() -> int:
        made = 0
        while not done.is_set():
            rollout = await client.generate(LONG_PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True)
            for completion in rollout.completions:
                assert_pure(completion)
                made += 1
        return made

    done = asyncio.Event()
    load = [asyncio.create_task(keep_generating()) for _ in range(4)]
    for version in range(telltale + 1, telltale + 6):
        await client.push_weights(version, canary_weights(service.config.model.path, version))
        rollout = await client.generate(PROMPT, max_tokens=4, temperature=0.0)
        assert set(rollout.completions[0].token_ids) == {token_of(version)}
    done.set()
    assert sum(await asyncio.gather(*load)) > 0


async def test_a_request_for_weights_that_nobody_pushed_is_told_so(client, telltale):
    with pytest.raises(TooEarly, match=f"min_weight_version={telltale + 7}"):
        await client.generate(PROMPT, max_tokens=2, min_weight_version=telltale + 7)
    rollout = await client.generate(PROMPT, max_tokens=2, min_weight_version=telltale)
    assert rollout.completions[0].versions == (telltale,)


async def test_exact_version_is_served_until_replaced_then_refused(service, client, http, telltale):
    wanted = {"weight_version": {"exact_version": telltale}}
    running = [
        asyncio.create_task(client.generate(PROMPT, max_tokens=1900, temperature=0.0, ignore_eos=True, **wanted))
        for _ in range(4)
    ]
    await _running(client, 4)
    await client.push_weights(telltale + 1, canary_weights(service.config.model.path, telltale + 1), mode="keep")
    for rollout in running:
        [completion] = (await rollout).completions
        assert (completion.finish_reason, completion.versions) == ("abort", (telltale,))
        assert_pure(completion)
    bodies = {
        "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
        "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    }
    for path, body in bodies.items():
        refused = await http.post(path, json={**body, **wanted})
        assert (refused.status_code, refused.headers["Retry-After"]) == (409, "1"), refused.text
        detail = refused.json()["error"]["detail"]
        assert sorted(detail["live"].values()) == [telltale + 1] * 2 and detail["latest_version"] == telltale + 1
        served = await http.post(path, json={**body, "weight_version": {"exact_version": telltale + 1}})
        assert served.status_code == 200, served.text


async def _running(client: RolloutClient, sequences: int) -> None:
    """Wait until so many sequences are in engines."""
    while sum(replica.running for replica in (await client.fleet()).replicas) < sequences:
        await asyncio.sleep(0.05)
