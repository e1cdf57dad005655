"""rLLM's model gateway 0.1.0 between OpenAI's SDK and the service: what it keeps of each call."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.clients.conftest import Start
from tests.clients.lines import ClientProcess
from tests.clients.questions import HELLO
from tests.support.native_route import assert_as_native

pytestmark = pytest.mark.client("rLLM's model gateway")

GREEDY_CHAT: Any = {"messages": HELLO, "temperature": 0, "max_tokens": 8}


@pytest.fixture
async def rllm(start: Start, service_url: str) -> ClientProcess:
    return await start("rllm", "rllm_gateway", service_url)


@pytest.fixture
async def agent(rllm: ClientProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    """An agent in the session "s-1", which asks for no tokens."""
    url = await rllm.call("gateway.start")
    async with openai.AsyncOpenAI(base_url=f"{url}/sessions/s-1/v1", api_key="EMPTY", max_retries=2) as agent:
        yield agent


async def test_traces_have_the_native_tokens(rllm, agent, model, client, push):
    for count in (1, 2):
        version = await push()
        await agent.chat.completions.create(model=str(model), **GREEDY_CHAT)
        traces = await rllm.call("gateway.traces", "s-1")
        assert len(traces) == count
        trace = traces[-1]
        prompt, tokens = trace["prompt_token_ids"], trace["completion_token_ids"]
        await assert_as_native(client, prompt, tokens, trace["logprobs"], version=version)
        assert trace["raw_response"]["weight_version"] == version


async def test_a_stream_is_traced_too(rllm, agent, model, client, push):
    version = await push()
    stream = await agent.chat.completions.create(model=str(model), stream=True, **GREEDY_CHAT)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    [trace] = await rllm.call("gateway.traces", "s-1")
    assert trace["response_message"].get("content", "") == text
    prompt, tokens = trace["prompt_token_ids"], trace["completion_token_ids"]
    await assert_as_native(client, prompt, tokens, trace["logprobs"], version=version)


async def test_completions_are_traced_too(rllm, agent, model, client, push):
    """This gateway looks for ids and logprobs only where chats have them; those of completions are where vLLM's are."""
    version = await push()
    await agent.completions.create(model=str(model), prompt="12345>", temperature=0, max_tokens=8)
    [trace] = await rllm.call("gateway.traces", "s-1")
    [choice] = trace["raw_response"]["choices"]
    assert trace["completion_token_ids"] == choice["token_ids"]
    prompt, logprobs = choice["prompt_token_ids"], choice["logprobs"]["token_logprobs"]
    await assert_as_native(client, prompt, choice["token_ids"], logprobs, version=version)
