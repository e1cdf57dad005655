"""Chats: vLLM's server classes over our dispatcher, with an engine in this process that says what it is told to."""

import json
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from rollout_service.errors import Overloaded
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from tests.unit.gateway.chats import HELLO, PROMPT, TOOL, URL, ScriptedEngine, ids


@pytest.fixture
def sdk(chat_http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="EMPTY", http_client=chat_http, max_retries=0)


class TestChat:
    async def test_the_sdk_gets_text_ids_logprobs_and_versions(
        self, sdk: openai.AsyncOpenAI, scripted: ScriptedEngine
    ) -> None:
        reply = await sdk.chat.completions.create(
            model="org/tiny",
            messages=HELLO,
            n=2,
            max_completion_tokens=9,
            logprobs=True,
            top_logprobs=1,
            extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True},
        )
        [call] = scripted.calls
        assert call.prompt_token_ids == ids(PROMPT) and call.sampling.max_tokens == 9
        assert not call.sampling.is_truncated and call.sampling.temperature == 1
        found = reply.model_dump()
        assert found["model"] == "org/tiny" and tuple(found["prompt_token_ids"]) == ids(PROMPT)
        for choice in found["choices"]:
            assert choice["message"]["content"] == "hello" and choice["finish_reason"] == "stop"
            assert tuple(choice["token_ids"]) == (*ids("hello"), 2)
            content = choice["logprobs"]["content"]
            assert [each["token"] for each in content] == [f"token_id:{token}" for token in choice["token_ids"]]
            assert {each["logprob"] for each in content} == {-0.5} and len(content[0]["top_logprobs"]) == 1
            assert [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"]] == [
                ("3", 0, 1),
                ("4", 1, 6),
            ]
        assert "weight_version" not in found  # there is not one

    async def test_a_stream_ends_with_the_versions(self, sdk: openai.AsyncOpenAI) -> None:
        stream = await sdk.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk.model_dump() async for chunk in stream]
        text = "".join(choice["delta"]["content"] or "" for chunk in chunks for choice in chunk["choices"])
        assert text == "hello" and chunks[-1]["usage"]["completion_tokens"] == 6
        [ended] = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        assert [span["version"] for span in ended["weight_versions"]] == ["3", "4"]

    async def test_the_model_may_choose_to_call_a_tool(self, sdk: openai.AsyncOpenAI, scripted: ScriptedEngine) -> None:
        scripted.text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        reply = await sdk.chat.completions.create(model="tiny", messages=HELLO, tools=[TOOL])
        [choice] = reply.choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1}
        assert scripted.calls[0].prompt_token_ids[:6] == ids("tools:")

    async def test_structure_reaches_the_engine(self, sdk: openai.AsyncOpenAI, scripted: ScriptedEngine) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        await sdk.chat.completions.create(
            model="tiny",
            messages=HELLO,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
        structured = scripted.calls[0].sampling.structured_outputs
        assert structured is not None and structured.json_schema == schema
        assert scripted.calls[0].sampling.is_truncated

    async def test_options_of_the_service_stand_beside_openais(
        self, chat_http: httpx.AsyncClient, scripted: ScriptedEngine
    ) -> None:
        body = {"model": "tiny", "messages": HELLO, "min_weight_version": 3, "cache_salt": "x", "user": "me"}
        reply = await chat_http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": "s-1"})
        assert reply.status_code == 200
        [call] = scripted.calls
        assert (call.min_weight_version, call.session_id, call.cache_salt) == (3, "s-1", "x")

    async def test_what_rllms_gateway_says_twice_is_taken_once(
        self, chat_http: httpx.AsyncClient, scripted: ScriptedEngine
    ) -> None:
        body = {"model": "tiny", "messages": HELLO, "logprobs": True, "return_token_ids": True}
        reply = await chat_http.post("/v1/chat/completions", json={**body, "extra_body": {"return_token_ids": True}})
        assert reply.status_code == 200, reply.text
        assert reply.json()["prompt_token_ids"] == list(ids(PROMPT)) and reply.json()["choices"][0]["token_ids"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "value", "named"),
        [
            ("beams", 3, "beams"),
            ("use_beam_search", True, "use_beam_search"),
            ("bad_words", ["x"], "bad_words"),
            ("vllm_xargs", {"x": 1}, "vllm_xargs"),
            ("min_weight_version", -1, "min_weight_version"),
            ("temperature", 3.0, "temperature"),
            ("top_logprobs", 21, "logprobs"),
            ("messages", "hi", "messages"),
            ("chat_template", "{{ 1 }}", "Chat template"),
            ("logprob_token_ids", [1], "logprob_token_ids"),
            ("messages", [], "conversation"),
            ("extra_body", {"top_k": 5}, "extra_body is no field of a request"),
        ],
    )
    async def test_what_is_not_implemented_is_a_400_by_name(
        self, chat_http: httpx.AsyncClient, scripted: ScriptedEngine, field: str, value: object, named: str
    ) -> None:
        body = {"model": "tiny", "messages": HELLO, "logprobs": True, field: value}
        reply = await chat_http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and named in reply.json()["error"]["message"], reply.text
        assert not scripted.calls

    async def test_a_body_of_nothing_is_a_400(self, chat_http: httpx.AsyncClient) -> None:
        for path in ("chat/completions", "responses", "messages", "messages/count_tokens"):
            for body in ({}, {"messages": 5, "input": 5}, {"prompt": 5, "input": "x"}):
                reply = await chat_http.post(f"/v1/{path}", json=body, headers={"X-Session-ID": ""})
                assert reply.status_code in (400, 422), reply.text

    async def test_another_model_is_a_404(self, sdk: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await sdk.chat.completions.create(model="gpt-9", messages=HELLO)

    async def test_a_conversation_that_is_too_long_is_a_400(self, sdk: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 600}])

    @pytest.mark.parametrize(
        ("path", "length", "body"),
        [
            ("chat/completions", "max_tokens", {"messages": HELLO}),
            ("chat/completions", "max_completion_tokens", {"messages": HELLO}),
            ("responses", "max_output_tokens", {"input": "hi"}),
            ("messages", "max_tokens", {"messages": HELLO}),
        ],
    )
    @pytest.mark.parametrize("asked", [500, 512, 10**6])
    async def test_a_length_is_bounded_by_the_context(
        self, chat_http: httpx.AsyncClient, scripted: ScriptedEngine, path: str, length: str, body: Any, asked: int
    ) -> None:
        reply = await chat_http.post(f"/v1/{path}", json={"model": "tiny", length: asked, **body})
        assert reply.status_code == 200, reply.text
        assert scripted.calls[0].sampling.max_tokens == min(asked, 512 - len(PROMPT))

    @pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
    async def test_a_prompt_that_fills_the_context_is_named(self, chat_http: httpx.AsyncClient, path: str) -> None:
        full = [{"role": "user", "content": "h" * (512 - len(PROMPT) + 2)}]
        body = {"model": "tiny", "messages": full} | ({"max_tokens": 9} if path == "messages" else {})
        if path == "responses":
            body = {"model": "tiny", "input": full}
        reply = await chat_http.post(f"/v1/{path}", json=body)
        assert reply.status_code == 400 and "maximum context length" in reply.json()["error"]["message"], reply.text

    @pytest.mark.parametrize("stream", [False, True])
    async def test_errors_of_the_service_keep_their_status(
        self, chat_http: httpx.AsyncClient, scripted: ScriptedEngine, stream: bool
    ) -> None:
        scripted.error = Overloaded("full")
        body = {"model": "tiny", "messages": HELLO, "stream": stream}
        reply = await chat_http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 503 and reply.json()["error"]["type"] == "Overloaded"
        assert "Retry-After" in reply.headers

    async def test_a_model_without_a_tokenizer_has_no_chats(self, chatting: Services) -> None:
        transport = httpx.ASGITransport(app=create_app(replace(chatting, tokenizer=None)))
        async with httpx.AsyncClient(transport=transport, base_url=URL) as http:
            reply = await http.post("/v1/chat/completions", json={"messages": HELLO})
        assert reply.status_code == 422 and "no tokenizer" in reply.json()["error"]["message"]


class TestOtherSurfaces:
    async def test_responses_answer_the_sdk(self, sdk: openai.AsyncOpenAI, scripted: ScriptedEngine) -> None:
        reply = await sdk.responses.create(model="tiny", input="hi", max_output_tokens=9)
        assert reply.output_text == "hello" and scripted.calls[0].prompt_token_ids == ids(PROMPT)
        with pytest.raises(openai.BadRequestError, match="not kept here"):
            await sdk.responses.create(model="tiny", input="hi", previous_response_id="x")

    async def test_messages_answer_anthropics_sdk(self, chatting: Services, scripted: ScriptedEngine) -> None:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=create_app(chatting)))
        client = anthropic.AsyncAnthropic(base_url=URL, api_key="EMPTY", http_client=http, max_retries=0)
        reply = await client.messages.create(model="tiny", max_tokens=9, messages=HELLO)
        assert [block.text for block in reply.content if block.type == "text"] == ["hello"]
        assert scripted.calls[0].prompt_token_ids == ids(PROMPT) and reply.usage.output_tokens == 6
        counted = await client.messages.count_tokens(model="tiny", messages=HELLO)
        assert counted.input_tokens == len(PROMPT)
        async with client.messages.stream(model="tiny", max_tokens=9, messages=HELLO) as stream:
            assert "".join([text async for text in stream.text_stream]) == "hello"

    async def test_a_tool_input_that_is_no_object_is_the_models_fault(
        self, chat_http: httpx.AsyncClient, scripted: ScriptedEngine
    ) -> None:
        """Without ``strict`` nothing holds a model to an object; 500 is what SDKs ask again after."""
        scripted.text = '<tool_call>\n{"name": "add", "arguments": 546}\n</tool_call>'
        tool = {"name": "add", "input_schema": {"type": "object"}}
        body = {"model": "tiny", "max_tokens": 90, "messages": HELLO, "tools": [tool]}
        reply = await chat_http.post("/v1/messages", json=body)
        assert reply.status_code == 500 and "what the model said" in reply.json()["error"]["message"], reply.text

    async def test_text_and_messages_become_ids_and_text_again(self, chat_http: httpx.AsyncClient) -> None:
        reply = (await chat_http.post("/tokenize", json={"model": "tiny", "prompt": "hi"})).json()
        assert tuple(reply["tokens"]) == ids("hi") and (reply["count"], reply["max_model_len"]) == (2, 512)
        reply = (await chat_http.post("/tokenize", json={"messages": HELLO})).json()
        assert tuple(reply["tokens"]) == ids(PROMPT)
        assert (await chat_http.post("/detokenize", json={"tokens": reply["tokens"]})).json()["prompt"] == PROMPT
