"""What OpenAI's and Anthropic's SDKs make of streams: the events of each protocol, in its order."""

import json
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from tests.unit.gateway.chats import HELLO, TOOL, URL

CALL = 'so<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
VERSIONS = [("3", 0, 1), ("4", 1, 6)]


@pytest.fixture
def sdk(chat_http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="EMPTY", http_client=chat_http, max_retries=0)


@pytest.fixture
def anthropics(chatting: Services) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=create_app(chatting)))
    return anthropic.AsyncAnthropic(base_url=URL, api_key="EMPTY", http_client=http, max_retries=0)


def spans(versions: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in versions]


class TestChat:
    async def test_chunks_are_role_text_end_and_usage(self, chat_http):
        body = {"model": "tiny", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
        reply = await chat_http.post("/v1/chat/completions", json=body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        *lines, last, nothing = reply.text.split("\n\n")
        assert (last, nothing) == ("data: [DONE]", "")
        *choices, usage = [json.loads(line.removeprefix("data: ")) for line in lines]
        deltas = [chunk["choices"][0]["delta"] for chunk in choices]
        assert deltas[0]["role"] == "assistant" and "".join(d.get("content") or "" for d in deltas) == "hello"
        ends = [chunk["choices"][0]["finish_reason"] for chunk in choices]
        assert ends == [None] * (len(ends) - 1) + ["stop"]
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6


class TestResponses:
    async def test_events_come_in_openais_order(self, sdk):
        events = [event async for event in await sdk.responses.create(model="tiny", input="hi", stream=True)]
        assert [event.type for event in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))

    async def test_a_reply_without_text_is_an_item(self, sdk, scripted):
        scripted.text = ""
        events = [event async for event in await sdk.responses.create(model="tiny", input="hi", stream=True)]
        assert [event.type for event in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        done, completed = events[3:]
        assert done.type == "response.output_item.done" and completed.type == "response.completed"
        assert completed.response.output == [done.item]

    async def test_a_tool_call_is_an_item_with_its_arguments(self, sdk, scripted):
        scripted.text = CALL
        add: Any = {"type": "function", **TOOL["function"], "strict": False}
        async with sdk.responses.stream(model="tiny", input="hi", tools=[add]) as stream:
            kinds = [event.type async for event in stream]
            reply = await stream.get_final_response()
        text, call = kinds.index("response.output_text.done"), kinds.index("response.function_call_arguments.done")
        assert kinds.index("response.function_call_arguments.delta") in range(text, call)
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
        called = reply.output[1]
        assert called.type == "function_call" and json.loads(called.arguments) == {"a": 1}

    async def test_the_last_event_has_the_versions(self, chat_http):
        body = {"model": "tiny", "input": "hi"}
        lines = (await chat_http.post("/v1/responses", json={**body, "stream": True})).text.split("\n\n")
        last = json.loads(lines[-2].removeprefix("event: response.completed\ndata: "))
        assert last["response"]["attempts"] == 1 and spans(last["response"]["weight_versions"]) == VERSIONS
        whole = (await chat_http.post("/v1/responses", json=body)).json()
        assert spans(whole["weight_versions"]) == VERSIONS


class TestMessages:
    async def test_events_come_in_anthropics_order(self, anthropics, scripted):
        stream = await anthropics.messages.create(model="tiny", max_tokens=9, messages=HELLO, stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]

    async def test_a_tool_call_is_a_block_with_its_arguments(self, anthropics, scripted):
        scripted.text = CALL
        function = TOOL["function"]
        add: Any = {"name": function["name"], "input_schema": function["parameters"]}
        async with anthropics.messages.stream(model="tiny", max_tokens=9, messages=HELLO, tools=[add]) as stream:
            reply = await stream.get_final_message()
        text, called = reply.content
        assert text.type == "text" and text.text == "so" and reply.stop_reason == "tool_use"
        assert called.type == "tool_use" and (called.name, called.input) == ("add", {"a": 1})

    async def test_the_event_of_the_stop_reason_has_the_versions(self, chat_http):
        body = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
        lines = (await chat_http.post("/v1/messages", json={**body, "stream": True})).text.split("\n\n")
        [end] = [line.removeprefix("event: message_delta\ndata: ") for line in lines if "message_delta" in line]
        assert json.loads(end)["delta"]["stop_reason"] == "end_turn"
        assert spans(json.loads(end)["weight_versions"]) == VERSIONS
        whole = (await chat_http.post("/v1/messages", json=body)).json()
        assert spans(whole["weight_versions"]) == VERSIONS
