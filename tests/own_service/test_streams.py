"""A killed replica's long rollouts go on from what had left it."""

import asyncio
import json
import sys

from benchmarks.common.paths import CPU_DEPLOYMENT
from rollout_service.client import RolloutClient
from rollout_service.local import running_service
from tests.own_service.apart import run_apart
from tests.support.processes import descendants
from tests.support.telltale import assert_pure, canary_weights

RUN = """
import asyncio, sys
from tests.own_service.test_streams import lose_a_replica
asyncio.run(lose_a_replica(sys.argv[1]))
"""
AT_ONCE, TOKENS = 6, 600
"""Rollouts of each kind, whole and streamed, and the tokens of each rollout."""


async def lose_a_replica(folder: str) -> None:
    """Kill one of two replicas under rollouts; write tokens, replicas and attempts of each, a JSON list a line."""
    overrides = {
        "weights": {"root": f"{folder}/log"},
        "model": {"path": f"{folder}/tiny-qwen3"},
        "scaling": {"min_replicas": 2, "max_replicas": 2},
        "engine": {"max_model_len": TOKENS + 64},
    }
    rollout = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    with running_service(CPU_DEPLOYMENT, overrides) as service:
        async with RolloutClient(service.url, retries=12) as client:
            await client.push_weights(1, canary_weights(service.config.model.path, 1))
            while [each.state for each in (await client.fleet()).replicas] != ["ready"] * 2:
                await asyncio.sleep(0.5)
            begun = [asyncio.Event() for _ in range(AT_ONCE)]

            async def read(event):
                async with client.generate_stream([5, 6, 7, 8], **rollout) as stream:
                    async for _ in stream:
                        event.set()
                return stream.rollout

            plain = [asyncio.create_task(client.generate([5, 6, 7, 8], **rollout)) for _ in range(AT_ONCE)]
            streams = [asyncio.create_task(read(event)) for event in begun]
            for event in begun:
                await event.wait()
            victim = descendants("ray::ServeReplica:rollout:engine")[0]
            for process in [*victim.children(recursive=True), victim]:
                process.kill()
            await client.push_weights(2, canary_weights(service.config.model.path, 2), wait="none")
            for done in await asyncio.gather(*plain, *streams):
                [completion] = done.completions
                assert_pure(completion)
                replicas = len({span.replica_id for span in completion.spans})
                sys.stdout.write(json.dumps([len(completion.token_ids), replicas, done.attempts]) + "\n")


async def test_rollouts_outlive_a_killed_replica_with_their_tokens(tmp_path):
    ended = [json.loads(line) for line in await run_apart(RUN, str(tmp_path)) if line.startswith("[")]
    assert len(ended) == 2 * AT_ONCE
    assert {tokens for tokens, _, _ in ended} == {TOKENS}
    # those of the killed replica have tokens of both
    assert any(replicas == 2 and attempts > 1 for _, replicas, attempts in ended)
