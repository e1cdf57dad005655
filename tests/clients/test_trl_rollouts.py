"""TRL 1.16's synchronous client samples: what GRPOTrainer and others in server mode call."""

import asyncio

import pytest

from rollout_service.model.tiny import character_tokenizer
from tests.support.native_route import assert_as_native

pytestmark = pytest.mark.client("TRL, sync")

PROMPTS = [[8, 9, 10], [11, 12]]
GREEDY = {"temperature": 0.0, "max_tokens": 8, "generation_kwargs": {"ignore_eos": True}}


async def test_generate_has_the_native_tokens(trl, service_url, client, push):
    vllm = await asyncio.to_thread(trl.sync_client.VLLMClient, service_url)
    for _ in range(2):
        version = await push()
        made = await asyncio.to_thread(vllm.generate, PROMPTS, **GREEDY)
        assert made["prompt_ids"] == PROMPTS
        assert made["logprob_token_ids"] == [[[token] for token in tokens] for tokens in made["completion_ids"]]
        for prompt, tokens, logprobs in zip(PROMPTS, made["completion_ids"], made["logprobs"], strict=True):
            await assert_as_native(client, prompt, tokens, [each for [each] in logprobs], version=version)


async def test_chat_has_the_native_tokens(trl, service_url, client, push):
    vllm = await asyncio.to_thread(trl.sync_client.VLLMClient, service_url)
    version = await push()
    messages = [[{"role": "user", "content": text}] for text in ("1+1", "2+2")]
    made = await asyncio.to_thread(vllm.chat, messages, **GREEDY)
    for prompt, tokens, logprobs in zip(made["prompt_ids"], made["completion_ids"], made["logprobs"], strict=True):
        await assert_as_native(client, prompt, tokens, [each for [each] in logprobs], version=version)


async def test_several_completions_with_likely_tokens(trl, service_url, push):
    """Prompt-major, ``n`` each; beside a sampled token the likeliest ones, in order."""
    await push()
    vllm = await asyncio.to_thread(trl.sync_client.VLLMClient, service_url)
    made = await asyncio.to_thread(
        vllm.generate, PROMPTS, n=3, max_tokens=5, logprobs=2, generation_kwargs={"ignore_eos": True, "seed": 2**62}
    )
    of_first, of_second = made["completion_ids"][:3], made["completion_ids"][3:]
    assert all(len({tuple(tokens) for tokens in each}) > 1 for each in (of_first, of_second))
    for tokens, ids, logprobs in zip(made["completion_ids"], made["logprob_token_ids"], made["logprobs"], strict=True):
        for token, candidates, values in zip(tokens, ids, logprobs, strict=True):
            assert token in candidates and 2 <= len(candidates) <= 3
            assert values == sorted(values, reverse=True)


async def test_a_regular_expression_is_kept_to(trl, service_url):
    vllm = await asyncio.to_thread(trl.sync_client.VLLMClient, service_url)
    made = await asyncio.to_thread(vllm.generate, ["12345>"], max_tokens=16, structured_outputs_regex="[0-9]{4}")
    text = character_tokenizer().decode(made["completion_ids"][0], skip_special_tokens=True)
    assert len(text) == 4 and text.isdecimal()


async def test_a_prompt_that_is_too_long_says_so(trl, service_url):
    vllm = await asyncio.to_thread(trl.sync_client.VLLMClient, service_url)
    with pytest.raises(Exception, match=r"Request failed: 400.*maximum context length"):
        await asyncio.to_thread(vllm.generate, [[8] * 5000])
