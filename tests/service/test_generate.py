"""The data routes as vLLM's and OpenAI's clients use them."""

import asyncio
import math

import openai

from rollout_service.client import RolloutClient

MODEL = "tiny-qwen3"


async def test_each_completion_has_ids_logprobs_and_weight_versions(http):
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"n": 3, "max_tokens": 6, "ignore_eos": True},
        "request_id": "r-1",
    }
    reply = (await http.post("/inference/v1/generate", json=body)).json()
    assert (reply["request_id"], reply["model"], reply["usage"]["completion_tokens"]) == ("r-1", MODEL, 18)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    for choice in reply["choices"]:
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
        assert all(math.isfinite(entry["logprob"]) and entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
        assert choice["finish_reason"] == "length"
        (span,) = choice["weight_versions"]
        assert (span["start"], span["end"]) == (0, 6) and span["version"].isdigit()


async def test_greedy_completions_and_seeded_ones_repeat(client):
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
        first, second = await client.generate_batch([[5, 6, 7]] * 2, max_tokens=12, **sampling)
        assert first.completions[0].token_ids == second.completions[0].token_ids


async def test_stop_tokens_end_a_completion_and_are_named(client):
    free = (await client.generate([5, 6], max_tokens=8, temperature=0.0, ignore_eos=True)).completions[0]
    stop = free.token_ids[3]
    first_stop = free.token_ids.index(stop)
    stopped = (await client.generate([5, 6], max_tokens=8, temperature=0.0, stop_token_ids=[stop])).completions[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.token_ids == free.token_ids[: first_stop + 1]


async def test_the_openai_package_gets_completions_and_logprobs(service):
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="unused") as openai_client:
        assert [model.id async for model in openai_client.models.list()] == [MODEL]
        reply = await openai_client.completions.create(
            model=MODEL, prompt=["1+1=", "2+2="], n=2, max_tokens=5, temperature=0.7, logprobs=0
        )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for choice in reply.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens or []) > 0
    assert reply.usage is not None and reply.usage.prompt_tokens == 8


async def test_candidates_and_structure_reach_the_engine(http):
    body = {"prompt": "1+1=", "logprobs": 3, "prompt_logprobs": 1, "structured_outputs": {"choice": ["2", "33"]}}
    reply = await http.post("/v1/completions", json=body)
    assert int(reply.headers["content-length"]) == len(reply.content)  # SkyRL parses no body without it
    [choice] = reply.json()["choices"]
    assert choice["text"] in ("2", "33") and choice["finish_reason"] == "stop"
    for logprob, top in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
        assert logprob in top.values() and 1 <= len(top) <= 4
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 3 and all(1 <= len(candidates) <= 2 for candidates in rest)


async def test_a_completion_is_scored_after_its_prompt(client):
    [completion] = (await client.generate([5, 6, 7], max_tokens=6, ignore_eos=True)).completions
    scores = await client.score([5, 6, 7, *completion.token_ids], start=3, top_logprobs=4)
    assert scores.offsets.tolist() == [0, 5, 10, 15, 20, 25, 30]
    assert scores.token_ids[scores.offsets[:-1]].tolist() == list(completion.token_ids)
    differences = scores.logprobs[scores.offsets[:-1]] - completion.logprobs
    assert abs(differences).mean() < 0.3  # another batch rounds otherwise
    assert scores.weight_version == completion.versions[-1]


async def test_a_request_the_client_cancels_is_aborted_in_the_engine(client):
    await client.pause()  # so that it cannot come to an end by itself
    rollout = asyncio.create_task(client.generate([5, 6], n=8, max_tokens=480, ignore_eos=True))
    await _until(client, running=8)
    rollout.cancel()
    await asyncio.wait([rollout])
    await _until(client, running=0)
    assert rollout.cancelled() and await client.is_paused()
    await client.resume()


async def test_requests_beyond_the_admission_limit_wait(http, client):
    await client.pause()
    body = {"token_ids": [5], "sampling_params": {"n": 60, "max_tokens": 2}}
    held = [asyncio.create_task(http.post("/inference/v1/generate", json=body)) for _ in range(9)]
    await _until(client, running=180)  # each replica holds one, and one of them had a free place
    held.pop().cancel()
    await client.resume()
    assert [(await reply).status_code for reply in held] == [200] * 8


async def test_a_request_with_more_prompts_than_a_replica_holds_is_answered(http):
    body = {"prompt": [[5 + i % 90, 7] for i in range(300)], "max_tokens": 2, "ignore_eos": True}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200 and len(reply.json()["choices"]) == 300


async def _until(client: RolloutClient, running: int) -> None:
    while sum(replica.running for replica in (await client.fleet()).replicas) != running:
        await asyncio.sleep(0.05)
