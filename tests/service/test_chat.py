"""Chats and sessions of the running service, by OpenAI's and Anthropic's own clients."""

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from rollout_service.local import LocalService

HELLO: list[Any] = [{"role": "user", "content": "1+1"}]
WHOLE = {"ignore_eos": True}
"""So that no reply is empty."""


@pytest.fixture
async def sdk(service: LocalService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0) as sdk:
        yield sdk


async def test_a_chat_has_the_tokens_and_logprobs_of_generate(sdk, client):
    reply = await sdk.chat.completions.create(
        model="tiny-qwen3",
        messages=HELLO,
        temperature=0,
        max_tokens=8,
        logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    chat = reply.model_dump()
    [choice] = chat["choices"]
    [same] = (await client.generate(chat["prompt_token_ids"], temperature=0, max_tokens=8, ignore_eos=True)).completions
    assert tuple(choice["token_ids"]) == same.token_ids
    assert [c["logprob"] for c in choice["logprobs"]["content"]] == pytest.approx(same.logprobs, abs=0.05)
    assert [int(span["version"]) for span in choice["weight_versions"]] == list(same.versions)
    assert chat["weight_version"] == same.versions[-1]


async def test_a_tool_that_must_be_called_is_called(sdk):
    parameters = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
    parameters["additionalProperties"] = False
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}
    reply = await sdk.chat.completions.create(
        model="tiny-qwen3",
        messages=HELLO,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},  # "required" may call without end
        max_tokens=400,
    )
    [choice] = reply.choices
    assert choice.message.tool_calls is not None
    call: Any = choice.message.tool_calls[0]
    assert call.function.name == "weather" and json.loads(call.function.arguments)["unit"] in ("c", "f")


async def by_chat(agent: openai.AsyncOpenAI, history: list[Any]) -> list[Any]:
    reply = await agent.chat.completions.create(model="tiny-qwen3", messages=history, max_tokens=12)
    return [{"role": "assistant", "content": reply.choices[0].message.content}]


async def by_responses(agent: openai.AsyncOpenAI, history: list[Any]) -> list[Any]:
    return list(
        (await agent.responses.create(model="tiny-qwen3", input=history, max_output_tokens=16, extra_body=WHOLE)).output
    )


async def by_a_stream_of_responses(agent: openai.AsyncOpenAI, history: list[Any]) -> list[Any]:
    async with agent.responses.stream(
        model="tiny-qwen3", input=history, max_output_tokens=16, extra_body=WHOLE
    ) as events:
        return list((await events.get_final_response()).output)


@pytest.mark.parametrize("reply", [by_chat, by_responses, by_a_stream_of_responses])
async def test_an_agents_turns_share_their_tokens(service, client, reply):
    async with client.session() as session:
        async with openai.AsyncOpenAI(base_url=session.openai_base_url, api_key="EMPTY", max_retries=0) as agent:
            history = list(HELLO)
            for _ in range(3):
                history += [*await reply(agent, history), {"role": "user", "content": "more"}]
        [branch] = (await session.trajectory()).branches()
    assert [turn.index for turn in branch] == [0, 1, 2]
    for before, after in itertools.pairwise(branch):
        seen = (*before.prompt_token_ids, *before.token_ids)
        assert after.prompt_token_ids[: len(seen)] == seen
    assert all(len(turn.logprobs) == len(turn.token_ids) and turn.spans for turn in branch)
