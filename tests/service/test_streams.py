"""Tokens leave the engines as they are made, and who does not read them any more stops the work."""

import asyncio
import json

import openai

from rollout_service.client import RolloutClient
from tests.support.telltale import assert_pure, canary_weights, token_of

PROMPT = [5, 6, 7]
LENGTH = 400


async def test_a_rollout_is_read_while_it_is_made_over_an_update(service, client, telltale):
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


async def test_who_goes_away_ends_the_work(client):
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


async def test_the_rest_of_a_batch_is_carried_on_with_newer_weights(service, client, telltale):
    """Short groups complete first; of the long ones every token is kept, and says which weights made it."""
    options = {"temperature": 0.2, "ignore_eos": True, "max_tokens": LENGTH, "n": 2}
    await client.pause("keep")  # so that the long ones are under way when the first is complete
    long = asyncio.create_task(client.generate_batch([PROMPT, PROMPT[::-1], PROMPT[:2]], until=1, **options))
    await _until(client, running=6)
    await client.resume()
    first = await long
    [(done, rollout)] = first.rollouts.items()
    assert [len(c.token_ids) for c in rollout.completions] == [LENGTH] * 2
    await _until(client, running=0)  # the engines have stopped, and are asked for nothing
    partial = list(first.partial.values())
    assert len(partial) == 2 and done not in first.partial and all(each.num_tokens for each in partial)
    had = {each.request_id: [c.token_ids for c in each.completions] for each in partial}
    await client.push_weights(telltale + 1, canary_weights(service.config.model.path, telltale + 1))
    second = await client.generate_batch([*partial, PROMPT[1:]], until=3, **options)
    assert sorted(second.rollouts) == [0, 1, 2] and not second.partial
    new = second.rollouts.pop(2)
    assert {c.versions for c in new.completions} == {(telltale + 1,)}
    seen = set()
    for rollout in second.rollouts.values():
        for completion, before in zip(rollout.completions, had[rollout.request_id], strict=True):
            assert len(completion.token_ids) == len(completion.logprobs) == LENGTH
            assert completion.token_ids[: len(before)] == before
            for span in completion.spans:  # at this temperature no other token is ever drawn
                assert set(completion.token_ids[span.start : span.end]) == {token_of(span.version)}
            seen.add(completion.versions)
    assert (telltale, telltale + 1) in seen


async def test_a_stop_string_across_the_cut_ends_what_is_carried_on(client, http, telltale):
    """The tokens of these weights tell their version: the text is known beforehand."""
    asked = {"prompt": "12345>", "sampling_params": {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}}
    whole = (await http.post("/inference/v1/generate", json=asked | {"output_mode": "text"})).json()
    [choice], prompt = whole["choices"], whole["prompt_token_ids"]
    stop = choice["text"][1:3]
    body = {
        "token_ids": prompt,
        "partial_token_ids": choice["token_ids"][:2],
        "output_mode": "text",
        "sampling_params": asked["sampling_params"] | {"stop": [stop]},
    }
    reply = (await http.post("/inference/v1/generate", json=body)).json()
    [rest] = reply["choices"]
    assert (rest["finish_reason"], rest["stop_reason"]) == ("stop", stop)
    assert rest["token_ids"] == choice["token_ids"][2:3] and rest["text"] == choice["text"][:1]
    refused = await http.post("/inference/v1/generate", json=body | {"sampling_params": {"max_tokens": 2}})
    assert refused.status_code == 422 and "max_tokens=2" in refused.text


async def test_chats_and_completions_are_streamed(service, http):
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
