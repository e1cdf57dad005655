"""OpenAI's and Anthropic's SDKs, in the versions beside vLLM's and in the newest, on every API that they have here."""

import json
from collections.abc import AsyncIterator, Iterable

import pytest

from tests.clients.conftest import folder_of
from tests.clients.lines import ClientError, ClientProcess, client_process
from tests.clients.questions import HELLO, PROMPT, SCHEMA, native_text
from tests.support.native_route import assert_as_native

TOKENS = {"return_token_ids": True, "ignore_eos": True}
GREEDY = {"temperature": 0}
"""Anthropic's SDK has no argument for it any more."""
CHAT, RESPONSES, MESSAGES = "chat.completions.create", "responses.create", "messages.create"


@pytest.fixture(
    params=[
        pytest.param(False, marks=pytest.mark.client("OpenAI's and Anthropic's SDKs, any agent")),
        pytest.param(True, marks=pytest.mark.client("The newest SDKs, openai-agents, pydantic-ai, LiteLLM")),
    ],
    ids=["beside vLLM", "newest"],
)
async def sdks(request: pytest.FixtureRequest) -> AsyncIterator[ClientProcess]:
    path = [folder_of("agents")] if request.param else []
    async with client_process("tests.clients.sdk_client", path=path) as process:
        yield process


@pytest.fixture
def url(service_url: str) -> str:
    """OpenAI's ``base_url``."""
    return f"{service_url}/v1"


class TestOpenAI:
    async def test_chats_and_their_streams_have_the_native_tokens(self, sdks, url, model, client, push):
        asked = {"model": str(model), "messages": HELLO, "temperature": 0, "max_tokens": 8, "logprobs": True}
        for _ in range(2):
            version = await push()
            chat = await sdks.call("openai.create", url, CHAT, **asked, extra_body=TOKENS)
            [choice] = chat["choices"]
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            await assert_as_native(client, chat["prompt_token_ids"], choice["token_ids"], logprobs, version=version)
            assert chat["weight_version"] == version
        usage = {"stream_options": {"include_usage": True}}
        chunks = await sdks.call("openai.stream", url, CHAT, **asked, **usage, extra_body=TOKENS)
        streamed = [each for chunk in chunks for each in chunk["choices"]]
        assert [token for each in streamed for token in each.get("token_ids") or ()] == choice["token_ids"]
        told = [logprob for each in streamed for logprob in (each["logprobs"] or {}).get("content") or ()]
        assert [each["logprob"] for each in told] == pytest.approx(logprobs, abs=1e-4)
        assert chunks[-1]["usage"]["completion_tokens"] == 8
        assert [each["finish_reason"] for each in streamed if each["finish_reason"]] == ["length"]

    async def test_a_forced_tool_is_called_on_both_apis(self, sdks, url, model):
        tool = {"name": "weather", "parameters": SCHEMA, "strict": True}
        chat = await sdks.call(
            *("openai.create", url, CHAT),
            model=str(model),
            messages=HELLO,
            tools=[{"type": "function", "function": tool}],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            max_tokens=400,
        )
        [call] = chat["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["unit"] in ("c", "f")
        reply = await sdks.call(
            *("openai.create", url, RESPONSES),
            model=str(model),
            input="1+1",
            tools=[{"type": "function", **tool}],
            tool_choice={"type": "function", "name": "weather"},
        )
        [call] = [item for item in reply["output"] if item["type"] == "function_call"]
        assert json.loads(call["arguments"])["unit"] in ("c", "f")

    async def test_structured_outputs_are_kept_to(self, sdks, url, model):
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        asked = {"model": str(model), "messages": HELLO, "max_tokens": 400, "response_format": wanted}
        reply = await sdks.call("openai.create", url, CHAT, **asked)
        assert json.loads(reply["choices"][0]["message"]["content"])["unit"] in ("c", "f")

    async def test_completions_have_the_native_tokens(self, sdks, url, model, client, push):
        version = await push()
        asked = {"model": str(model), "prompt": "12345>", "temperature": 0, "max_tokens": 8, "logprobs": 0}
        [choice] = (await sdks.call("openai.create", url, "completions.create", **asked, extra_body=TOKENS))["choices"]
        logprobs = choice["logprobs"]["token_logprobs"]
        await assert_as_native(client, choice["prompt_token_ids"], choice["token_ids"], logprobs, version=version)

    async def test_responses_say_what_the_native_route_says(self, sdks, url, model, client, push):
        version = await push()
        asked = {"model": str(model), "input": "1+1", "temperature": 0, "max_output_tokens": 8}
        reply = await sdks.call("openai.create", url, RESPONSES, **asked)
        [text] = [part["text"] for item in reply["output"] for part in item.get("content") or ()]
        assert text == await native_text(client) and reply["weight_version"] == version
        events = await sdks.call("openai.stream", url, RESPONSES, **asked)
        assert_streamed((each["delta"] for each in events if each["type"] == "response.output_text.delta"), text)

    async def test_errors_are_the_sdks(self, sdks, url, model):
        with pytest.raises(ClientError, match=r"NotFoundError.*gpt-9"):
            await sdks.call("openai.create", url, CHAT, model="gpt-9", messages=HELLO)
        overlong = [{"role": "user", "content": "1" * 5000}]
        with pytest.raises(ClientError, match=r"BadRequestError.*maximum context length"):
            await sdks.call("openai.create", url, CHAT, model=str(model), messages=overlong)


def assert_streamed(pieces: Iterable[str], text: str) -> None:
    """vLLM's hermes parser holds back what may begin a tag, and never sends it when the reply ends there."""
    streamed = "".join(pieces)
    assert text.startswith(streamed) and "<tool_call>".startswith(text.removeprefix(streamed))


class TestAnthropic:
    async def test_messages_say_what_the_native_route_says(self, sdks, service_url, model, client, push):
        version = await push()
        asked = {"model": str(model), "max_tokens": 8, "messages": HELLO, "extra_body": GREEDY}
        reply = await sdks.call("anthropic.create", service_url, MESSAGES, **asked)
        text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
        assert text == await native_text(client) and reply["weight_version"] == version
        assert 1 <= reply["usage"]["output_tokens"] <= 8
        events = await sdks.call("anthropic.stream", service_url, MESSAGES, **asked)
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert_streamed((delta["text"] for delta in deltas), text)

    async def test_messages_are_counted(self, sdks, service_url, model):
        asked = {"model": str(model), "messages": HELLO, "system": "brief"}
        counted = await sdks.call("anthropic.create", service_url, "messages.count_tokens", **asked)
        assert counted["input_tokens"] == len("system: brief\n" + PROMPT)

    async def test_the_tool_that_must_be_used_is_used(self, sdks, service_url, model):
        reply = await sdks.call(
            *("anthropic.create", service_url, MESSAGES),
            model=str(model),
            max_tokens=400,
            messages=HELLO,
            tools=[{"name": "weather", "input_schema": SCHEMA, "strict": True}],
            tool_choice={"type": "tool", "name": "weather"},
        )
        [used] = [block for block in reply["content"] if block["type"] == "tool_use"]
        assert used["name"] == "weather" and used["input"]["unit"] in ("c", "f")

    async def test_an_agents_turn_is_kept_in_tokens(self, sdks, model, client, push):
        version = await push()
        asked = {"model": str(model), "max_tokens": 8, "messages": HELLO, "extra_body": GREEDY}
        async with client.session() as session:
            reply = await sdks.call("anthropic.create", session.anthropic_base_url, MESSAGES, **asked)
            [[turn]] = (await session.trajectory()).branches()
        assert reply["usage"]["output_tokens"] == len(turn.token_ids)
        await assert_as_native(client, turn.prompt_token_ids, turn.token_ids, turn.logprobs, version=version)
