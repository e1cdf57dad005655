"""SkyRL 0.4's own RemoteInferenceClient samples and controls."""

import pytest

from tests.clients.lines import ClientError
from tests.clients.questions import HELLO
from tests.support.native_route import LOGPROB_TOLERANCE, assert_as_native

pytestmark = pytest.mark.client("SkyRL")

PROMPTS = [[8, 9, 10], [11, 12]]
SAMPLING = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 8,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}
"""Of SkyRL's GeneratorConfig, for a greedy evaluation."""


async def test_generate_has_the_native_tokens(skyrl, client, push):
    for _ in range(2):
        version = await push()
        batch = {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING, "session_ids": ["a", "b"]}
        made = await skyrl.call("rollouts.generate", batch)
        assert set(made["stop_reasons"]) <= {"stop", "length"} and all(made["responses"])
        for prompt, tokens, logprobs in zip(PROMPTS, made["response_ids"], made["response_logprobs"], strict=True):
            await assert_as_native(client, prompt, tokens, logprobs, version=version, min_tokens=1)


async def test_tinker_samples_with_the_prompts_logprobs(skyrl, client, push):
    await push()
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[0]}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 6, "temperature": 1.0, "seed": 7},
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }
    made = await skyrl.call("rollouts.sample", {"json": body})
    assert len(made["sequences"]) == 2
    assert all(len(each["tokens"]) == len(each["logprobs"]) > 0 for each in made["sequences"])
    first, *others = made["prompt_logprobs"]
    assert first is None and len(others) == len(PROMPTS[0]) - 1 and all(logprob < 0 for logprob in others)
    scores = await client.score(PROMPTS[0], top_logprobs=2)
    assert others == pytest.approx(scores.logprobs[scores.offsets[:-1]].tolist(), abs=LOGPROB_TOLERANCE)
    first, *tops = made["topk_prompt_logprobs"]
    assert first is None
    for top, start, end in zip(tops, scores.offsets, scores.offsets[1:], strict=False):
        row = dict(zip(scores.token_ids[start:end].tolist(), scores.logprobs[start:end].tolist(), strict=True))
        assert len(top) == 2 and dict(top) == pytest.approx(
            {token: row[token] for token, _ in top}, abs=LOGPROB_TOLERANCE
        )


async def test_chats_and_texts_become_tokens(skyrl, client, push):
    version = await push()
    chat = {
        "messages": HELLO,
        "session_id": "agent-1",
        "max_tokens": 8,
        "temperature": 0.0,
        "logprobs": True,
        "return_token_ids": True,
    }
    reply = await skyrl.call("rollouts.chat_completion", {"json": chat})
    [choice] = reply["choices"]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    await assert_as_native(client, reply["prompt_token_ids"], choice["token_ids"], logprobs, version=version)
    [ids] = await skyrl.call("rollouts.tokenize", ["12345>"])
    assert len(ids) == 6 and await skyrl.call("rollouts.detokenize", [ids]) == ["12345>"]


async def test_its_control_calls_are_answered(skyrl, service_url, client):
    assert await skyrl.call("rollouts.get_world_size") == [1, 1]
    await skyrl.call("rollouts.pause")
    assert await client.is_paused()
    reset = await skyrl.call("rollouts.reset_prefix_cache", True)
    assert reset[service_url] == {"status": 200, "body": {"success": True}}
    await skyrl.call("rollouts.resume")
    assert not await client.is_paused()
    await skyrl.call("rollouts.finish_session", "agent-1")


async def test_a_refusal_is_told_as_an_error(skyrl):
    batch = {"prompt_token_ids": [[10**6]], "sampling_params": SAMPLING}
    with pytest.raises(ClientError, match="outside the vocabulary"):
        await skyrl.call("rollouts.generate", batch)
