"""Tokens leave the engines as they are made, and who does not read them any more stops the work."""

import asyncio
import json

import httpx
import openai

from rollout_service.client import RolloutClient
from rollout_service.local import LocalService
from tests.support.telltale import assert_pure, canary_weights

PROMPT = [5, 6, 7]
LENGTH = 400


async def test_a_rollout_is_read_while_it_is_made_over_an_update(
    service: LocalService, client: RolloutClient, telltale: int
) -> None:
    weights = canary_weights(service.config.model.path, telltale + 1)
    async with client.generate_stream(PROMPT, max_tokens=LENGTH, temperature=0.0, ignore_eos=True) as stream:
        first = await anext(stream)
        assert 0 < len(first.token_ids) < LENGTH and first.finish_reason is None
        await client.push_weights(telltale + 1, weights, mode="abort")
        pieces = [first, *[piece async for piece in stream]]
    [completion] = stream.rollout.completions
    assert len(pieces) > 2 and sum((piece.token_ids for piece in pieces), ()) == completion.token_ids
    assert len(completion.token_ids) == LENGTH and completion.versions == (telltale, telltale + 1)
    assert stream.rollout.attempts > 1  # one more where it went on at a replica that was to be updated, too
    assert_pure(completion)


async def test_who_goes_away_ends_the_work(client: RolloutClient) -> None:
    """A paused engine never ends a rollout by itself."""
    async with client.generate_stream(PROMPT, max_tokens=480, n=8, ignore_eos=True) as stream:
        await anext(stream)
        await client.pause("keep")
        await _until(client, running=8)
    await _until(client, running=0)
    await client.resume()


async def _until(client: RolloutClient, running: int) -> None:
    while sum(replica.running for replica in (await client.fleet()).replicas) != running:
        await asyncio.sleep(0.05)


async def test_chats_and_completions_are_streamed(service: LocalService, http: httpx.AsyncClient) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="unused") as sdk:
        chat = await sdk.chat.completions.create(
            model="tiny-qwen3",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=60,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        said = [chunk.choices[0].delta.content async for chunk in chat if chunk.choices[0].delta.content]
    assert len(said) > 2
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True, "return_token_ids": True}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        events = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]
    *chunks, done = events
    counts = [len(json.loads(chunk)["choices"][0]["token_ids"]) for chunk in chunks]
    assert done == "[DONE]" and sum(counts) == 60 and len(counts) > 2
