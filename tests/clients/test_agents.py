"""Agent programs over the newest SDKs of OpenAI and Anthropic. The SDKs themselves are in ``test_sdks.py``."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollout_service.client import RolloutClient
from tests.clients.conftest import Start
from tests.clients.lines import ClientProcess
from tests.clients.questions import HELLO, SCHEMA, native_text

pytestmark = pytest.mark.client("The newest SDKs, openai-agents, pydantic-ai, LiteLLM")


@pytest.fixture
async def agents(start: Start, model: Path) -> ClientProcess:
    return await start("agents", "agents_client", model)


async def assert_one_branch(client: RolloutClient, session: Any, version: int, turns: int) -> None:
    """The session's turns are one conversation in tokens, and each has the native route's logprobs."""
    [branch] = (await session.trajectory()).branches()
    assert len(branch) == turns
    for before, after in pairwise(branch):
        read = (*before.prompt_token_ids, *before.token_ids)
        assert after.prompt_token_ids[: len(read)] == read
    assert {span.version for turn in branch for span in turn.spans} == {version}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
class TestAgents:
    @pytest.mark.parametrize("api", ["chat", "responses"])
    async def test_openai_agents_calls_its_tool_and_answers(self, agents, client, push, api, stream):
        version = await push()
        async with client.session() as session:
            found = await agents.call("openai_agents.run", session.openai_base_url, api, stream)
            assert found["units"] in (["c"], ["f"]) and isinstance(found["output"], str)
            called, last = found["items"][:2], found["items"][2:]
            assert called == ["tool_call_item", "tool_call_output_item"]
            # of a chat whose text is empty, as a random model's may be, the SDK makes no item
            assert last == ["message_output_item"] or (api == "chat" and not (last or found["output"]))
            await assert_one_branch(client, session, version, turns=2)

    @pytest.mark.parametrize("api", ["chat", "responses", "messages"])
    async def test_pydantic_ai_gets_its_structured_answers(self, agents, client, push, api, stream):
        version = await push()
        async with client.session() as session:
            url = session.anthropic_base_url if api == "messages" else session.openai_base_url
            units = await agents.call("pydantic_ai.run", url, api, stream)
            assert len(units) == 2 and set(units) <= {"c", "f"}
            await assert_one_branch(client, session, version, turns=2)


class TestLiteLLM:
    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    async def test_chats_say_what_the_native_route_says(self, agents, service_url, model, client, provider):
        asked = {"messages": HELLO, "temperature": 0, "max_tokens": 8}
        where = ("acompletion", f"{provider}/{model}", f"{service_url}/v1")
        reply = await agents.call("litellm.call", *where, **asked)
        text = reply["choices"][0]["message"]["content"]
        assert text == await native_text(client)
        chunks = await agents.call("litellm.stream", *where, **asked)
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks) == text

    async def test_a_forced_tool_is_called(self, agents, service_url, model):
        reply = (
            await agents.call(  # its provider hosted_vllm takes "strict" out, and vLLM then lets arguments be anything
                *("litellm.call", "acompletion", f"openai/{model}", f"{service_url}/v1"),
                messages=HELLO,
                tools=[{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}],
                tool_choice={"type": "function", "function": {"name": "weather"}},
            )
        )
        [call] = reply["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["unit"] in ("c", "f")

    async def test_responses_say_what_the_native_route_says(self, agents, service_url, model, client):
        where = ("aresponses", f"openai/{model}", f"{service_url}/v1")
        reply = await agents.call("litellm.call", *where, input="1+1", temperature=0, max_output_tokens=16)
        [text] = [part["text"] for item in reply["output"] for part in item.get("content") or ()]
        assert text == await native_text(client, 16)  # LiteLLM asks for no fewer, as OpenAI has it

    async def test_messages_say_what_the_native_route_says(self, agents, service_url, model, client):
        where = ("anthropic.messages.acreate", f"anthropic/{model}", service_url)
        reply = await agents.call("litellm.call", *where, messages=HELLO, max_tokens=8, temperature=0)
        assert "".join(block["text"] for block in reply["content"]) == await native_text(client)
