"""OpenAI's and Anthropic's SDKs, in the versions beside vLLM's, on every API that they have here."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from rollout_service.client import RolloutClient
from tests.clients.conftest import Push
from tests.support.native_route import assert_as_native

pytestmark = pytest.mark.client("OpenAI's and Anthropic's SDKs, any agent")

HELLO: list[Any] = [{"role": "user", "content": "1+1"}]
PROMPT = "user: 1+1\nassistant: "
"""What the chat template makes of it."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOKENS = {"return_token_ids": True, "ignore_eos": True}
GREEDY = {"temperature": 0}
"""Anthropic's SDK has no argument for it any more."""


@pytest.fixture
async def openai_sdk(service_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{service_url}/v1", api_key="EMPTY", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
async def anthropic_sdk(service_url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=service_url, api_key="EMPTY", max_retries=0) as sdk:
        yield sdk


async def native_text(client: RolloutClient, max_tokens: int) -> str:
    """What the native route says to ``PROMPT``, greedily."""
    [completion] = (await client.generate(PROMPT, temperature=0.0, max_tokens=max_tokens)).completions
    assert completion.text is not None
    return completion.text


class TestOpenAI:
    async def test_the_model_is_listed(self, openai_sdk: openai.AsyncOpenAI, model: Path) -> None:
        assert str(model) in [card.id async for card in openai_sdk.models.list()]

    async def test_chats_have_the_native_tokens(
        self, openai_sdk: openai.AsyncOpenAI, model: Path, client: RolloutClient, push: Push
    ) -> None:
        for _ in range(2):
            version = await push()
            reply = await openai_sdk.chat.completions.create(
                model=str(model), messages=HELLO, temperature=0, max_tokens=8, logprobs=True, extra_body=TOKENS
            )
            chat = reply.model_dump()
            [choice] = chat["choices"]
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            await assert_as_native(client, chat["prompt_token_ids"], choice["token_ids"], logprobs, version=version)
            assert chat["weight_version"] == version

    async def test_a_stream_is_the_chat_in_pieces(
        self, openai_sdk: openai.AsyncOpenAI, model: Path, client: RolloutClient, push: Push
    ) -> None:
        version = await push()
        stream = await openai_sdk.chat.completions.create(
            model=str(model),
            messages=HELLO,
            temperature=0,
            max_tokens=8,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=TOKENS,
        )
        chunks = [chunk.model_dump() async for chunk in stream]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ids = [token for choice in choices for token in choice.get("token_ids") or ()]
        logprobs = [each["logprob"] for choice in choices for each in (choice["logprobs"] or {}).get("content") or ()]
        await assert_as_native(client, chunks[0]["prompt_token_ids"], ids, logprobs, version=version)
        assert chunks[-1]["usage"]["completion_tokens"] == 8
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]

    async def test_a_tool_that_must_be_called_is_called(self, openai_sdk: openai.AsyncOpenAI, model: Path) -> None:
        tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
        reply = await openai_sdk.chat.completions.create(
            model=str(model),
            messages=HELLO,
            tools=[tool],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            max_tokens=400,
        )
        calls: Any = reply.choices[0].message.tool_calls
        assert calls[0].function.name == "weather" and json.loads(calls[0].function.arguments)["unit"] in ("c", "f")

    async def test_structured_outputs_are_kept_to(self, openai_sdk: openai.AsyncOpenAI, model: Path) -> None:
        reply = await openai_sdk.chat.completions.create(
            model=str(model),
            messages=HELLO,
            max_tokens=400,
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        )
        assert json.loads(reply.choices[0].message.content or "")["unit"] in ("c", "f")

    async def test_completions_have_the_native_tokens(
        self, openai_sdk: openai.AsyncOpenAI, model: Path, client: RolloutClient, push: Push
    ) -> None:
        version = await push()
        reply = await openai_sdk.completions.create(
            model=str(model), prompt="12345>", temperature=0, max_tokens=8, logprobs=0, extra_body=TOKENS
        )
        [choice] = reply.model_dump()["choices"]
        logprobs = choice["logprobs"]["token_logprobs"]
        await assert_as_native(client, choice["prompt_token_ids"], choice["token_ids"], logprobs, version=version)

    async def test_responses_say_what_the_native_route_says(
        self, openai_sdk: openai.AsyncOpenAI, model: Path, client: RolloutClient, push: Push
    ) -> None:
        version = await push()
        asked: Any = {"model": str(model), "input": "1+1", "temperature": 0, "max_output_tokens": 8}
        reply = await openai_sdk.responses.create(**asked)
        assert reply.output_text == await native_text(client, 8)
        assert reply.model_dump()["weight_version"] == version
        events: list[Any] = [event async for event in await openai_sdk.responses.create(**asked, stream=True)]
        assert events[-1].response.output_text == reply.output_text

    async def test_errors_are_the_sdks(self, openai_sdk: openai.AsyncOpenAI, model: Path) -> None:
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await openai_sdk.chat.completions.create(model="gpt-9", messages=HELLO)
        overlong: Any = [{"role": "user", "content": "1" * 5000}]
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await openai_sdk.chat.completions.create(model=str(model), messages=overlong)


class TestAnthropic:
    async def test_messages_say_what_the_native_route_says(
        self, anthropic_sdk: anthropic.AsyncAnthropic, model: Path, client: RolloutClient, push: Push
    ) -> None:
        asked: Any = {"model": str(model), "max_tokens": 8, "messages": HELLO, "extra_body": GREEDY}
        for _ in range(2):
            version = await push()
            reply = await anthropic_sdk.messages.create(**asked)
            text = "".join(block.text for block in reply.content if block.type == "text")
            assert text == await native_text(client, 8)
            assert reply.model_dump()["weight_version"] == version and 1 <= reply.usage.output_tokens <= 8
            async with anthropic_sdk.messages.stream(**asked) as stream:
                assert "".join([piece async for piece in stream.text_stream]) == text

    async def test_messages_are_counted(self, anthropic_sdk: anthropic.AsyncAnthropic, model: Path) -> None:
        counted = await anthropic_sdk.messages.count_tokens(model=str(model), messages=HELLO, system="brief")
        assert counted.input_tokens == len("system: brief\n" + PROMPT)

    async def test_the_tool_that_must_be_used_is_used(
        self, anthropic_sdk: anthropic.AsyncAnthropic, model: Path
    ) -> None:
        reply = await anthropic_sdk.messages.create(
            model=str(model),
            max_tokens=400,
            messages=HELLO,
            tools=[{"name": "weather", "input_schema": SCHEMA, "strict": True}],
            tool_choice={"type": "tool", "name": "weather"},
        )
        [used] = [block for block in reply.content if block.type == "tool_use"]
        assert used.name == "weather" and used.input["unit"] in ("c", "f")

    async def test_an_agents_turn_is_kept_in_tokens(self, model: Path, client: RolloutClient, push: Push) -> None:
        version = await push()
        async with client.session() as session:
            async with anthropic.AsyncAnthropic(base_url=session.anthropic_base_url, api_key="EMPTY") as agent:
                reply = await agent.messages.create(model=str(model), max_tokens=8, messages=HELLO, extra_body=GREEDY)
            [[turn]] = (await session.trajectory()).branches()
        assert reply.usage.output_tokens == len(turn.token_ids)
        await assert_as_native(client, turn.prompt_token_ids, turn.token_ids, turn.logprobs, version=version)
