"""What OpenAI's and Anthropic's SDKs make of streams: the events of each protocol, in its order."""

import json
from typing import Any

import pytest

from tests.unit.gateway.chats import HELLO, TOOL, chunks_of, spans

CALL = 'so<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
VERSIONS = [("3", 0, 1), ("4", 1, 6)]


class TestChat:
    async def test_chunks_are_role_text_end_and_usage(self, chat_http):
        body = {"model": "tiny", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
        reply = await chat_http.post("/v1/chat/completions", json=body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        *choices, usage = chunks_of(reply.text)
        deltas = [chunk["choices"][0]["delta"] for chunk in choices]
        assert deltas[0]["role"] == "assistant" and "".join(d.get("content") or "" for d in deltas) == "hello"
        ends = [chunk["choices"][0]["finish_reason"] for chunk in choices]
        assert ends == [None] * (len(ends) - 1) + ["stop"]
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6


class TestResponses:
    @pytest.mark.parametrize(
        ("text", "inside"),
        [
            ("hello", ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]),
            ("", []),  # the item is there without text, too
        ],
    )
    async def test_events_come_in_openais_order(self, sdk, scripted, text, inside):
        scripted.text = text
        events = [event async for event in await sdk.responses.create(model="tiny", input="hi", stream=True)]
        names = ["created", "in_progress", "output_item.added", *inside, "output_item.done", "completed"]
        assert [event.type for event in events] == [f"response.{name}" for name in names]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        done, completed = events[-2:]
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


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        ("/v1/responses", {"input": "hi"}, "response.completed"),
        ("/v1/messages", {"max_tokens": 9, "messages": HELLO}, "message_delta"),
    ],
)
async def test_the_event_that_ends_a_reply_has_the_versions(chat_http, path, body, event):
    lines = (await chat_http.post(path, json={"model": "tiny", **body, "stream": True})).text.split("\n\n")
    [end] = [line.partition("data: ")[2] for line in lines if line.startswith(f"event: {event}\n")]
    whole = (await chat_http.post(path, json={"model": "tiny", **body})).json()
    for told in (json.loads(end).get("response", json.loads(end)), whole):
        assert told["attempts"] == 1 and spans(told["weight_versions"]) == VERSIONS
