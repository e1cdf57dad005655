"""Chats: vLLM's server classes over our dispatcher, with an engine in this process that says what it is told to."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pydantic
import pytest
from vllm.entrypoints.generate.base.serving import PRIORITY_HEADER

from rollout_service.compat import vllm_serving
from rollout_service.errors import LONGEST_REASON, NonFiniteLogprob, Overloaded
from rollout_service.fleet.progress import CompletionDelta
from rollout_service.gateway.generate import spans as spans_of
from rollout_service.gateway.openai import routes
from rollout_service.gateway.openai.routes import MAX_NUMBERS, MAX_PARTS, MAX_VALUES
from rollout_service.gateway.openai.serving import LazyServing
from rollout_service.gateway.prompts import BYTES_PER_TOKEN
from rollout_service.protocol.rollout import Completion, Rollout, Span
from tests.unit.gateway.chats import HELLO, PROMPT, TOOL, chunks_of, config_of, events_of, ids, spans
from tests.unit.gateway.fakes import http_to

A_TOOL = {"name": "add", "input_schema": {"type": "object"}}
APIS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chat/completions": ({"messages": HELLO, "max_tokens": 90}, TOOL),
    "messages": ({"messages": HELLO, "max_tokens": 90}, A_TOOL),
    "responses": ({"input": "hi"}, {"type": "function", **TOOL["function"]}),
}
"""Path → the body of a request, and the tool ``add``."""


def asked_of(path: str, tools: bool = False, **more: object) -> dict[str, Any]:
    """Return a request to one of ``APIS``."""
    body, tool = APIS[path]
    return {"model": "tiny", **body, **({"tools": [tool]} if tools else {}), **more}


class TestChat:
    async def test_the_sdk_gets_text_ids_logprobs_and_versions(self, sdk, scripted):
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
            assert spans(choice["weight_versions"]) == [("3", 0, 1), ("4", 1, 6)]
        assert "weight_version" not in found  # there is not one

    async def test_the_model_may_choose_to_call_a_tool(self, sdk, scripted):
        scripted.text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        reply = await sdk.chat.completions.create(model="tiny", messages=HELLO, tools=[TOOL])
        [choice] = reply.choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1}
        assert scripted.calls[0].prompt_token_ids[:6] == ids("tools:")

    async def test_structure_reaches_the_engine(self, sdk, scripted):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        await sdk.chat.completions.create(
            model="tiny",
            messages=HELLO,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
        structured = scripted.calls[0].sampling.structured_outputs
        assert structured is not None and structured.json_schema == schema
        assert scripted.calls[0].sampling.is_truncated

    async def test_options_of_the_service_stand_beside_openais(self, chat_http, scripted):
        options = {"min_weight_version": 3, "cache_salt": "x", "user": "me", "return_token_ids": True}
        said_twice = {"extra_body": {"return_token_ids": True}}  # as rllm's gateway does
        body = {"model": "tiny", "messages": HELLO, **options, **said_twice}
        reply = await chat_http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": "s-1"})
        assert reply.status_code == 200 and reply.json()["prompt_token_ids"] == list(ids(PROMPT)), reply.text
        [call] = scripted.calls
        assert (call.min_weight_version, call.session_id, call.cache_salt) == (3, "s-1", "x")


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "value", "named"),
        [
            ("beams", 3, "beams"),
            ("use_beam_search", True, "use_beam_search"),
            ("return_prompt_text", True, "return_prompt_text is not implemented"),
            ("return_token_offsets", True, "return_token_offsets is not implemented"),
            ("bad_words", ["x"], "bad_words"),
            ("vllm_xargs", {"x": 1}, "vllm_xargs"),
            ("min_weight_version", -1, "min_weight_version"),
            ("temperature", 3.0, "temperature"),
            ("temperature", 0.001, "temperature"),
            ("logit_bias", {"5": 101}, "logit_bias"),
            ("max_tokens", 0, "max_tokens"),
            ("top_logprobs", 21, "logprobs"),
            ("messages", "hi", "messages"),
            ("chat_template", "{{ 1 }}", "Chat template"),
            ("logprob_token_ids", [1], "logprob_token_ids"),
            ("structured_outputs", {"regex": "a", "whitespace_pattern": "x"}, "structured_outputs.whitespace_pattern"),
            ("structured_outputs", True, "structured_outputs is not an object"),
            ("messages", [], "conversation"),
            ("messages", [{"role": "user", "content": ["hi"]}], "a list in the request: 0"),
            ("extra_body", {"top_k": 5}, "extra_body is no field of a request"),
            ("length_penalty", 2.0, "length_penalty is of beam search"),
            ("response_format", {"type": "json_object", "schema": {}}, "response_format.schema: not a field"),
            ("stream_options", {"include_usage": True, "chunks": 2}, "stream_options.chunks"),
        ],
    )
    async def test_what_is_not_implemented_is_a_400_by_name(self, chat_http, scripted, field, value, named):
        body = {"model": "tiny", "messages": HELLO, "logprobs": True, "stream": field == "stream_options", field: value}
        reply = await chat_http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and named in reply.json()["error"]["message"], reply.text
        assert not scripted.calls

    async def test_what_agents_add_to_messages_tools_and_streams_is_taken(self, chat_http, scripted):
        cached = {"cache_control": {"type": "ephemeral"}}
        said = {"role": "assistant", "content": "a", "annotations": [], "refusal": None, "audio": None, **cached}
        tool = {**TOOL, "function": TOOL["function"] | {"strict": None, **cached}, **cached}
        options = {
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False, "other": None},
        }
        body = {"model": "tiny", "messages": [*HELLO, said, *HELLO], "tools": [tool], **options}
        reply = await chat_http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200 and len(scripted.calls) == 1, reply.text

    async def test_a_body_of_nothing_is_a_400(self, chat_http):
        for path in ("chat/completions", "responses", "messages", "messages/count_tokens"):
            for body in ({}, {"messages": 5, "input": 5}, {"prompt": 5, "input": "x"}):
                reply = await chat_http.post(f"/v1/{path}", json=body, headers={"X-Session-ID": ""})
                assert reply.status_code in (400, 422), reply.text

    async def test_another_model_is_a_404(self, sdk):
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await sdk.chat.completions.create(model="gpt-9", messages=HELLO)

    @pytest.mark.parametrize(
        ("path", "length"),
        [
            ("chat/completions", "max_tokens"),
            ("chat/completions", "max_completion_tokens"),
            ("responses", "max_output_tokens"),
            ("messages", "max_tokens"),
        ],
    )
    async def test_a_length_is_bounded_by_the_context(self, chat_http, scripted, path, length):
        room, body = 512 - len(PROMPT), asked_of(path)
        body.pop("max_tokens", None)
        for asked, granted in ((9, 9), (500, room), (512, room), (10**6, room)):
            reply = await chat_http.post(f"/v1/{path}", json={**body, length: asked})
            assert reply.status_code == 200, reply.text
            assert scripted.calls[-1].sampling.max_tokens == granted

    @pytest.mark.parametrize("path", APIS)
    async def test_a_prompt_that_fills_the_context_is_named(self, chat_http, path):
        full = [{"role": "user", "content": "h" * (512 - len(PROMPT) + 2)}]
        field = "input" if path == "responses" else "messages"
        reply = await chat_http.post(f"/v1/{path}", json=asked_of(path) | {field: full})
        assert reply.status_code == 400 and "maximum context length" in reply.json()["error"]["message"], reply.text

    @pytest.mark.parametrize("stream", [False, True])
    async def test_errors_of_the_service_keep_their_status(self, chat_http, scripted, stream):
        scripted.error = Overloaded("full")
        body = {"model": "tiny", "messages": HELLO, "stream": stream}
        reply = await chat_http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 503 and reply.json()["error"]["type"] == "Overloaded"
        assert "Retry-After" in reply.headers

    async def test_a_model_without_a_tokenizer_has_no_chats(self, chatting):
        async with http_to(replace(chatting, tokenizer=None)) as http:
            reply = await http.post("/v1/chat/completions", json={"messages": HELLO})
        assert reply.status_code == 422 and "no tokenizer" in reply.json()["error"]["message"]


CALL = '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'
MALFORMED = [CALL % "546", CALL % '["x"]', CALL % '"x"', CALL % '{"a": ', CALL % ("[" * 9), CALL % "null"]
MALFORMED += ["<tool_call>\n[1]\n</tool_call>", CALL.replace("add", "5") % '{"a": ']
MALFORMED += [CALL % '{"a": NaN}', CALL % '{"a": 1e999}', CALL % r'{"a": "\ud800"}']  # of these no JSON can be made
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>"
)


class TestWhatTheModelSaid:
    """Whatever it is, it is a reply: SDKs ask again after a 500, which selects the samples."""

    @pytest.mark.parametrize("said", MALFORMED)
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_malformed_call_is_one_reply_and_turn(self, chat_http, scripted, said, stream):
        scripted.text = said
        session = (await chat_http.post("/v1/sessions")).json()
        body = asked_of("messages", tools=True, stream=stream)
        reply = await chat_http.post(session["anthropic_path"] + "/v1/messages", json=body)
        assert reply.status_code == 200 and len(scripted.calls) == 1, reply.text
        [turn] = (await chat_http.get(f"/v1/sessions/{session['session_id']}")).json()["turns"]
        assert tuple(turn["token_ids"]) == (*ids(said), 2)
        if stream:
            assert turn["message"]["content"] or turn["message"]["tool_calls"]
        else:
            assert reply.json()["content"] == [{"type": "text", "text": said}]
            assert reply.json()["stop_reason"] == "end_turn" and turn["message"]["content"] == said

    @pytest.mark.parametrize(
        "said",
        [
            KIMI % '{"a": ',
            KIMI % ("[" * 1500),
            CALL % ("[" * 1500),
            *(CALL % arguments for arguments in ('{"a": ', "null", "{a}", '["x"]', "3", '"a"')),
        ],
    )
    @pytest.mark.parametrize("path", APIS)
    async def test_a_conversation_goes_on_after_a_bad_call(self, chatting, model, scripted, said, path):
        config = config_of(model, tool_parser="hermes" if "arguments" in said else "kimi_k2")
        roomy = config.model_copy(update={"engine": config.engine.model_copy(update={"max_model_len": 4096})})
        scripted.text = said
        field, messages = "input" if path == "responses" else "messages", list[Any](HELLO)
        async with http_to(replace(chatting, max_model_len=4096, chats=LazyServing(roomy))) as http:
            session = (await http.post("/v1/sessions")).json()
            for turn in (1, 2):
                body = asked_of(path, tools=True) | {field: messages}
                reply = await http.post(f"{session['anthropic_path']}/v1/{path}", json=body)
                assert reply.status_code == 200 and len(scripted.calls) == turn, reply.text
                told = reply.json()
                messages += told["output"] if path == "responses" else [_message_of(told)]
                messages.append({"role": "user", "content": "go on"})
            kept = (await http.get(f"/v1/sessions/{session['session_id']}")).json()
        assert kept["paths"] == [[0, 1]]
        before = (*scripted.calls[0].prompt_token_ids, *ids(said), 2)
        assert scripted.calls[1].prompt_token_ids[: len(before)] == before

    @pytest.mark.parametrize("said", [CALL % r'{"a": "\ud800"}', (CALL % "{}").replace("add", r"\ud800")])
    @pytest.mark.parametrize("path", APIS)
    @pytest.mark.parametrize("stream", [False, True])
    async def test_half_a_character_in_a_call_is_a_reply(self, chat_http, scripted, said, path, stream):
        scripted.text = said
        reply = await chat_http.post(f"/v1/{path}", json=asked_of(path, tools=True, stream=stream))
        assert reply.status_code == 200 and r"\ud800" in reply.text, reply.text

    @pytest.mark.parametrize(
        ("path", "required", "end"),
        [("chat/completions", "required", '"finish_reason":"stop"'), ("messages", {"type": "any"}, '"end_turn"')],
    )
    async def test_a_required_call_that_is_none_ends_as_text(self, chat_http, path, required, end):
        told = await chat_http.post(f"/v1/{path}", json=asked_of(path, tools=True, tool_choice=required))
        assert "hello" in told.text and end in told.text

    @pytest.mark.parametrize("path", APIS)
    async def test_an_error_after_the_first_tokens_is_told(self, chat_http, path, monkeypatch):
        async def fail(*_: object, **__: object) -> AsyncIterator[CompletionDelta]:
            made = Completion(index=0, token_ids=(5,), logprobs=(-0.5,), finish_reason="abort", spans=ONE_TOKEN)
            yield CompletionDelta(made, 0, is_last=False)
            raise NonFiniteLogprob("token 1 has no logprob")

        monkeypatch.setattr("rollout_service.gateway.openai.engine.live_pieces", fail)
        reply = await chat_http.post(f"/v1/{path}", json=asked_of(path, stream=True))
        errors = [each for each in events_of(reply.text) if each.get("error")]
        assert [each["error"]["message"] for each in errors] == ["token 1 has no logprob"], reply.text

    @pytest.mark.parametrize("path", APIS)
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_parser_that_fails_leaves_the_text(self, chat_http, chatting, path, stream, monkeypatch):
        def fail(*_: object, **__: object) -> None:
            raise RecursionError("too deep")

        serving = await chatting.chats.get(chatting)
        for parser in (serving.chat.parser_cls, serving.messages.parser_cls, serving.responses.parser):
            base = parser.__mro__[2]
            monkeypatch.setattr(base, "parse", fail)
            monkeypatch.setattr(base, "parse_delta", fail)
        reply = await chat_http.post(f"/v1/{path}", json=asked_of(path, tools=True, stream=stream))
        assert reply.status_code == 200 and "hello" in _all_text(reply.text), reply.text
        assert "too deep" not in reply.text

    async def test_a_failing_parser_loses_no_text_of_a_stream(self, chat_http, chatting, monkeypatch):
        async def in_two(*_: object, **__: object) -> AsyncIterator[CompletionDelta | Rollout]:
            for start, text in enumerate("hi"):
                made = Completion(index=0, token_ids=ids(text), logprobs=(-0.5,), finish_reason="stop", spans=ONE_TOKEN)
                yield CompletionDelta(made, start, is_last=start == 1)
            whole = Completion(index=0, token_ids=(), logprobs=(), finish_reason="stop", spans=())
            yield Rollout(request_id="r", prompt_token_ids=(5,), completions=(whole,), replica_id="a")

        def fail(self: object, delta_text: str, *_: object, finished: bool, **__: object) -> None:
            if finished:
                raise ValueError("no call")

        serving = await chatting.chats.get(chatting)
        monkeypatch.setattr(serving.chat.parser_cls.__mro__[2], "parse_delta", fail)
        monkeypatch.setattr("rollout_service.gateway.openai.engine.live_pieces", in_two)
        body = {"model": "tiny", "messages": HELLO, "tools": [TOOL], "stream": True, "include_stop_str_in_output": True}
        assert _all_text((await chat_http.post("/v1/chat/completions", json=body)).text) == "hi"

    async def test_a_reply_that_cannot_be_sent_is_no_turn(self, chat_http, scripted, monkeypatch):
        session = (await chat_http.post("/v1/sessions")).json()

        def fail(*_: object, **__: object) -> None:
            raise ValueError("no JSON")

        with monkeypatch.context() as patch:
            patch.setattr("rollout_service.gateway.openai.routes._with_choices", fail)
            with pytest.raises(ValueError, match="no JSON"):
                await chat_http.post(session["openai_path"] + "/chat/completions", json={"messages": HELLO})
        assert not (await chat_http.get(f"/v1/sessions/{session['session_id']}")).json()["turns"]


ONE_TOKEN = (Span(version=3, start=0, end=1),)


def _message_of(told: dict[str, Any]) -> dict[str, Any]:
    """The message that an agent sends back after a reply."""
    return told["choices"][0]["message"] if "choices" in told else {"role": "assistant", "content": told["content"]}


def _all_text(events: str) -> str:
    """The text of a reply, or of a stream's events that bring more of it."""
    found = []
    for event in events_of(events):
        delta = event.get("delta")
        found.append(delta if isinstance(delta, str) else (delta or {}).get("text") or "")
        found += [choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ())]
    return "".join(found) or events


class TestCutShort:
    """What a pause returns as it is: no API says that it is complete."""

    @pytest.mark.parametrize("cut_after", [0, 3])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_every_api_says_that_the_rest_is_missing(self, chat_http, scripted, cut_after, stream):
        scripted.cut_after = cut_after

        async def ends(path: str, body: dict[str, Any]) -> dict[str, Any]:
            """The reply, or the event with the end of a stream."""
            reply = await chat_http.post(f"/v1/{path}", json=body | {"stream": stream})
            assert reply.status_code == 200, reply.text
            events = events_of(reply.text) if stream else [reply.json()]
            names = ('"finish_reason": "', '"stop_reason": "', '"response": {')
            return [each for each in events if not stream or any(name in json.dumps(each) for name in names)][-1]

        for path, body in (("chat/completions", asked_of("chat/completions")), ("completions", {"prompt": "hi"})):
            assert (await ends(path, body))["choices"][0]["finish_reason"] == "abort"
        message = await ends("messages", asked_of("messages"))
        assert (message.get("delta") or message)["stop_reason"] == "max_tokens"
        response = await ends("responses", asked_of("responses"))
        response = response.get("response", response)
        assert response["status"] == "incomplete" and response["incomplete_details"]["reason"] == "max_output_tokens"
        assert message["finish_reason"] == response["finish_reason"] == "abort"
        assert all(item["status"] == "incomplete" for item in response["output"])

    async def test_a_stream_says_which_item_was_cut(self, chat_http, scripted):
        whole = CALL % '{"a": 1}'
        scripted.text = f"{whole}\n{whole}"
        scripted.cut_after = len(whole) + 50
        reply = await chat_http.post("/v1/responses", json=asked_of("responses", tools=True, stream=True))
        events = events_of(reply.text)
        ended = [each["item"]["status"] for each in events if each["type"] == "response.output_item.done"]
        assert ended == ["completed", "incomplete"]
        assert [each["sequence_number"] for each in events] == list(range(len(events)))

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_reply_cut_after_a_call_is_no_call(self, chat_http, scripted, stream):
        scripted.text = CALL % '{"a": 1}' + "and then"
        scripted.cut_after = len(scripted.text) - 3
        body = asked_of("chat/completions", tools=True, stream=stream)
        reply = await chat_http.post("/v1/chat/completions", json=body)
        assert '"finish_reason":"abort"' in reply.text.replace(": ", ":") and 'tool_calls"' in reply.text
        assert '"finish_reason":"tool_calls"' not in reply.text.replace(": ", ":")


def tool_result(*content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message of Anthropic's API with the result of a tool."""
    return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": list(content)}]}]


class TestMessages:
    """Fields of Anthropic's API are taken, or refused under the name that the caller wrote."""

    BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 90, "messages": HELLO}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("field", "value", "named"),
        [
            ("beams", 3, "beams"),
            ("temperature", 0.001, "temperature"),
            ("thinking", {"type": "enabled", "budget_tokens": 1024}, "thinking.budget_tokens"),
            ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}, "context_management"),
            ("context_management", {"edits": 1}, "context_management"),
            ("min_weight_version", -1, "min_weight_version"),
            ("mcp_servers", [{"name": "x"}], "mcp_servers"),
            ("thinking", {"type": "adaptive", "depth": 3}, "thinking.depth"),
            ("output_config", {"effort": "low", "task_budget": {"total": 9}}, "output_config.task_budget"),
            ("tool_choice", {"type": "auto", "max_uses": 1}, "tool_choice.max_uses"),
            ("messages", tool_result({"type": "document", "source": {}}), "a tool_result with document"),
            ("messages", tool_result({"type": "text", "text": "a"}, {"type": "search_result"}), "with search_result"),
        ],
    )
    async def test_what_is_not_implemented_is_refused(self, chat_http, scripted, field, value, named):
        reply = await chat_http.post("/v1/messages", json={**self.BODY, "max_tokens": 2000, field: value})
        assert reply.status_code == 400 and named in reply.json()["error"]["message"], reply.text
        assert not scripted.calls
        if field not in ("temperature", "min_weight_version"):  # these are no fields of a count
            body = {"model": "tiny", "messages": HELLO, field: value}
            counted = await chat_http.post("/v1/messages/count_tokens", json=body)
            told = reply.text.replace("/v1/messages:", "/v1/messages/count_tokens:")
            assert (counted.status_code, counted.text) == (400, told)

    async def test_what_agents_send_is_taken(self, chat_http, scripted):
        block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
        keeps = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        thinking = {"type": "adaptive", "display": "omitted", "block_binding": {}}
        options = {"thinking": thinking, "context_management": keeps, "metadata": {"user_id": "u"}}
        body = {**self.BODY, **options, "messages": [{"role": "user", "content": [block]}], "min_weight_version": 3}
        reply = await chat_http.post("/v1/messages", json={**body, "cache_control": {"type": "ephemeral"}})
        assert reply.status_code == 200, reply.text
        assert scripted.calls[0].min_weight_version == 3


SURFACES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/v1/completions": {"prompt": "hi"},
    "/inference/v1/generate": {"prompt": "hi"},
}


class TestNames:
    """Whatever a caller can name is short: the monitor keeps request ids with the rollouts that it remembers."""

    @pytest.mark.parametrize("path", SURFACES)
    async def test_a_long_name_or_an_extreme_priority_is_refused(self, chat_http, scripted, path):
        names = ("request_id", "session_id", "user", "cache_salt", "model", "prompt_cache_key")
        for field, value in [(name, "x" * 20_000) for name in names] + [("priority", 2**31), ("priority", -(2**70))]:
            reply = await chat_http.post(path, json={"model": "tiny", **SURFACES[path], field: value})
            assert reply.status_code in (400, 422) and field in reply.json()["error"]["message"]
            assert len(reply.content) < 4096 and not scripted.calls

    @pytest.mark.parametrize(
        ("header", "value"), [("X-Request-Id", "x" * 257), ("X-Session-ID", "x" * 257), ("X-Priority", str(2**40))]
    )
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/sessions/{}/v1/chat/completions"])
    async def test_a_header_is_bounded_as_its_field(self, chat_http, scripted, path, header, value):
        session = (await chat_http.post("/v1/sessions")).json()["session_id"]
        name = PRIORITY_HEADER if header == "X-Priority" else header
        body = {"model": "tiny", "messages": HELLO}
        reply = await chat_http.post(path.format(session), json=body, headers={name: value})
        assert reply.status_code in (400, 422) and not scripted.calls, reply.text


IMAGE = "data:image/png;base64," + "A" * BYTES_PER_TOKEN * 512


class TestSize:
    """vLLM validates and renders on the event loop: what no context can hold does not get there."""

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
    async def test_what_no_context_holds_is_refused_unread(self, chat_http, path, monkeypatch):
        monkeypatch.setattr(pydantic.BaseModel, "model_validate", _unread)
        monkeypatch.setattr(routes, "fail_fast_validator", _unread)
        part = {"type": "text", "text": "a"}
        field = "input" if path == "/v1/responses" else "messages"
        text = [{"role": "user", "content": "a" * (BYTES_PER_TOKEN * 512 + 1)}]
        messages = [{"role": "user", "content": "a"}] * MAX_PARTS
        parts: list[Any] = [{"role": "user", "content": [part] * MAX_PARTS}]
        for asked in (text, messages, parts, [{"a" * (BYTES_PER_TOKEN * 512): "b"}], [None] * MAX_VALUES):
            reply = await chat_http.post(path, json={"model": "tiny", "max_tokens": 9, field: asked})
            assert reply.status_code == 400 and reply.json()["error"]["type"] == "ContextTooLong", reply.text

    async def test_token_ids_that_messages_bring_back_have_a_bound_of_their_own(self, chat_http):
        async def status_of(count: int) -> int:
            turn = {"role": "assistant", "content": "a", "prompt_token_ids": [1] * count}
            body = asked_of("chat/completions", messages=[*HELLO, turn, *HELLO])
            return (await chat_http.post("/v1/chat/completions", json=body)).status_code

        assert [await status_of(count) for count in (2 * MAX_VALUES, MAX_NUMBERS)] == [200, 400]

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("chat/completions", {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}),
            ("responses", {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}),
            (
                "responses",
                {"type": "function_call_output", "call_id": "t", "output": [{"type": "input_file", "data": IMAGE}]},
            ),
            ("messages", {"role": "user", "content": [{"type": "document", "source": {"data": IMAGE}}]}),
            ("messages", tool_result({"type": "image", "source": {"data": IMAGE}})[0]),
        ],
    )
    async def test_an_image_is_no_text_that_is_too_long(self, chat_http, path, message):
        field = "input" if path == "responses" else "messages"
        error = (await chat_http.post(f"/v1/{path}", json=asked_of(path) | {field: [message]})).json()["error"]
        assert error["type"] == "BadRequest" and "images, audio and files are not implemented" in error["message"]

    async def test_what_a_tool_is_called_with_is_no_image(self, chat_http):
        page = {"content": [{"type": "image", "src": "a.png"}]}
        call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": page}]}
        body = asked_of("messages", tools=True, messages=[*HELLO, call, *tool_result({"type": "text", "text": "ok"})])
        reply = await chat_http.post("/v1/messages", json=body)
        assert reply.status_code == 200, reply.text

    async def test_an_item_of_many_names_is_not_read(self, chat_http, monkeypatch):
        monkeypatch.setattr(routes, "fail_fast_validator", _unread)
        items = [{"role": "user", "content": "a"}, {"role": "user", "content": "a"} | {f"x{i}": 1 for i in range(63)}]
        reply = await chat_http.post("/v1/responses", json={"model": "tiny", "input": items})
        assert reply.status_code == 400 and "input[1]: the item has 65 names" in reply.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "field", "value"),
        [
            ("chat/completions", "top_logprobs", [1] * 9999),
            ("chat/completions", "tool_choice", [1] * 9999),
            ("messages", "thinking", {"type": [1] * 9999}),
        ],
    )
    async def test_a_refusal_does_not_repeat_a_long_value(self, chat_http, path, field, value):
        reply = await chat_http.post(f"/v1/{path}", json=asked_of(path, **{field: value}))
        assert reply.status_code == 400 and len(reply.text) < 3 * LONGEST_REASON, reply.text

    @pytest.mark.parametrize(
        ("item", "named"),
        [
            (5, "valid dictionary"),
            ({"foo": 1}, "Field required"),
            ({"type": "function_call_output", "output": 5}, "FunctionCallOutput.output"),
            ({"role": "user", "content": [{"type": "input_text", "text": 5}]}, "EasyInputMessageParam.content"),
        ],
    )
    async def test_a_wrong_item_is_a_short_refusal(self, chat_http, item, named):
        """vLLM's union has up to 200 problems of an item."""
        reply = await chat_http.post("/v1/responses", json={"model": "tiny", "input": [item]})
        assert reply.status_code == 400 and named in reply.json()["error"]["message"], reply.text
        assert len(reply.text) < 2 * LONGEST_REASON

    async def test_a_stream_of_many_choices_reads_each_choices_spans_a_few_times(self, chat_http, monkeypatch):
        """Their number grows with the choices, not with its square: thousands would block the gateway for minutes."""
        read = list[int]()
        monkeypatch.setattr(routes, "spans", lambda completion: read.append(completion.index) or spans_of(completion))
        body = asked_of("chat/completions", n=20, stream=True)
        ends = [
            choice
            for chunk in chunks_of((await chat_http.post("/v1/chat/completions", json=body)).text)
            for choice in chunk["choices"]
            if choice["finish_reason"]
        ]
        assert [choice["index"] for choice in ends] == list(range(20)) and len(read) <= 3 * 20
        assert all(spans(choice["weight_versions"]) == [("3", 0, 1), ("4", 1, 6)] for choice in ends)

    async def test_more_ids_than_a_context_are_not_decoded(self, chat_http):
        reply = await chat_http.post("/detokenize", json={"tokens": [5] * 513})
        assert reply.status_code == 400 and "513 ids" in reply.json()["error"]["message"]

    @pytest.mark.parametrize("token", [-1, 128])
    async def test_an_id_beyond_the_vocabulary_is_not_decoded(self, chat_http, token):
        reply = await chat_http.post("/detokenize", json={"tokens": [5, token]})
        assert reply.status_code == 400 and "token" in reply.json()["error"]["message"], reply.text
        if token > 0:  # vLLM's class refuses the other
            assert reply.json()["error"]["detail"] == {"position": 1, "token_id": 128, "vocab_size": 128}

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
    async def test_many_wrong_entries_have_the_problems_of_the_first(self, chat_http, scripted, path):
        names = {f"x{i}": "y" for i in range(1000)}
        for field in ("logit_bias", "weight_version", "structured_outputs"):
            for value in (names, dict.fromkeys(names, 1)):
                reply = await chat_http.post(path, json={"model": "tiny", **SURFACES[path], field: value})
                assert reply.status_code == 400 and len(reply.json()["error"]["detail"].get("fields", ())) <= 2, (
                    reply.text
                )
        assert not scripted.calls

    @pytest.mark.parametrize("entry", [{}, 0, None, ""])
    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            ("/v1/chat/completions", ("messages", "tools", "tool_calls")),
            ("/v1/responses", ("input", "tools", "content")),
            ("/v1/messages", ("messages", "tools", "system", "content")),
            ("/v1/messages/count_tokens", ("messages", "tools", "system", "content")),
            ("/tokenize", ("messages", "tools")),
        ],
    )
    async def test_a_long_list_has_the_problems_of_its_first_entry(self, chat_http, path, fields, entry):
        conversation = "input" if path == "/v1/responses" else "messages"
        for field in fields:
            found = []
            for count in (1, 100):
                asked = {field: [entry] * count}
                if field in ("content", "tool_calls"):
                    asked = {conversation: [{"role": "assistant", "content": "a"} | asked]}
                body = {"model": "tiny", "max_tokens": 9, conversation: HELLO} | asked
                reply = await chat_http.post(path, json=body)
                assert reply.status_code == 400, reply.text
                found.append(reply.json()["error"]["detail"]["problems"])
            assert found[0] == found[1], field


def _unread(*_: object, **__: object) -> None:
    raise AssertionError("it was read")


class TestBounds:
    """One place for each bound: what the other data routes take, a chat takes."""

    @pytest.mark.parametrize(
        ("path", "stops", "body"),
        [
            ("chat/completions", "stop", {"messages": HELLO}),
            ("messages", "stop_sequences", {"messages": HELLO, "max_tokens": 9}),
        ],
    )
    async def test_as_many_stop_strings_as_elsewhere(self, chat_http, scripted, path, stops, body):
        many = [f"x{i}" for i in range(64)]
        reply = await chat_http.post(f"/v1/{path}", json={"model": "tiny", **body, stops: many})
        assert reply.status_code == 200 and scripted.calls[0].sampling.stop == tuple(many), reply.text
        reply = await chat_http.post(f"/v1/{path}", json={"model": "tiny", **body, stops: [*many, "y"]})
        assert reply.status_code == 400 and stops in reply.json()["error"]["message"]

    @pytest.mark.parametrize("path", [*SURFACES, "/tokenize", "/detokenize"])
    async def test_null_is_the_default_of_every_field(self, chat_http, path):
        classes = (vllm_serving.ChatCompletionRequest, vllm_serving.ResponsesRequest, vllm_serving.TokenizeChatRequest)
        nulls = dict.fromkeys(name for cls in classes for name in cls.model_fields)
        asked = {"/tokenize": {"prompt": "hi"}, "/detokenize": {"tokens": [5]}, **SURFACES}[path]
        reply = await chat_http.post(path, json={**nulls, "model": "tiny", **asked})
        assert reply.status_code == 200, reply.text

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"])
    @pytest.mark.parametrize("lengths", [{"min_tokens": 9, "max_tokens": 8}, {"min_tokens": 511}])
    async def test_too_many_min_tokens_are_refused_with_a_remedy(self, chat_http, path, lengths):
        fields = {"sampling_params": lengths} if path == "/inference/v1/generate" else lengths
        reply = await chat_http.post(path, json={"model": "tiny", **SURFACES[path], **fields})
        assert reply.status_code in (400, 422), reply.text
        message = reply.json()["error"]["message"]
        assert "min_tokens=" in message or "got" in message
        assert message.endswith(("raise max_tokens", "shorten one of them")), message

    async def test_what_vllm_sets_itself_is_not_the_callers(self, chatting, scripted):
        """vLLM skips the prefix cache for prompt_logprobs, and names a first token for routed experts."""
        http = http_to(replace(chatting, returns_experts=True))
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        assert scripted.calls[0].sampling.routed_experts_prompt_start is None
        reply = await http.post("/v1/chat/completions", json=body | {"routed_experts_prompt_start": 0})
        assert reply.status_code == 400 and "routed_experts_prompt_start" in reply.json()["error"]["message"]
        reply = await http.post("/v1/chat/completions", json={**body, "stream": False, "prompt_logprobs": 0})
        assert "skip_reading_prefix_cache" not in reply.text and scripted.calls[-1].sampling.prompt_logprobs == 0

    @pytest.mark.parametrize(
        "parts",
        [
            [{"type": "output_text", "text": "a", "annotations": []}, {"type": "output_text", "text": "b"}],
            [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}],
            [{"type": "refusal", "refusal": "ab"}],
        ],
    )
    async def test_all_parts_of_a_reply_are_read(self, chat_http, scripted, parts):
        item = {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": parts}
        short = {"role": "assistant", "content": "ab"}
        for each in (item, short):
            given = [{"role": "user", "content": "q"}, each, {"role": "user", "content": "x"}]
            reply = await chat_http.post("/v1/responses", json={"model": "tiny", "input": given})
            assert reply.status_code == 200, reply.text
        of_parts, of_text = scripted.calls
        assert of_parts.prompt_token_ids == of_text.prompt_token_ids

    async def test_as_many_logprobs_as_the_engine_returns(self, chatting, scripted):
        http = http_to(replace(chatting, max_logprobs=40))
        body = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 40}
        reply = await http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200 and scripted.calls[0].sampling.logprobs == 40, reply.text
        reply = await http.post("/v1/chat/completions", json=body | {"top_logprobs": 41})
        assert reply.status_code == 400 and "logprobs=41" in reply.json()["error"]["message"]


class TestOtherSurfaces:
    async def test_responses_answer_the_sdk(self, sdk, scripted):
        reply = await sdk.responses.create(model="tiny", input="hi", max_output_tokens=9)
        assert reply.output_text == "hello" and scripted.calls[0].prompt_token_ids == ids(PROMPT)
        with pytest.raises(openai.BadRequestError, match="not kept here"):
            await sdk.responses.create(model="tiny", input="hi", previous_response_id="x")

    @pytest.mark.parametrize("stream", [False, True])
    async def test_null_is_the_default_of_a_response(self, chat_http, stream):
        body = asked_of("responses", stream=stream, truncation=None, background=None)
        reply = await chat_http.post("/v1/responses", json=body)
        assert reply.status_code == 200 and "hello" in reply.text, reply.text

    async def test_an_unknown_option_of_responses_is_refused(self, chat_http, scripted):
        body = asked_of("responses", reasoning={"effort": "low"}, text={"verbosity": "low"})
        assert (await chat_http.post("/v1/responses", json=body)).status_code == 200
        for field in ("reasoning", "text"):
            reply = await chat_http.post("/v1/responses", json=body | {field: {"depth": 3}})
            assert reply.status_code == 400 and f"{field}.depth" in reply.json()["error"]["message"], reply.text
        assert len(scripted.calls) == 1

    async def test_messages_answer_anthropics_sdk(self, anthropics, scripted):
        reply = await anthropics.messages.create(model="tiny", max_tokens=9, messages=HELLO)
        assert [block.text for block in reply.content if block.type == "text"] == ["hello"]
        assert scripted.calls[0].prompt_token_ids == ids(PROMPT) and reply.usage.output_tokens == 6
        counted = await anthropics.messages.count_tokens(model="tiny", messages=HELLO)
        assert counted.input_tokens == len(PROMPT)
        async with anthropics.messages.stream(model="tiny", max_tokens=9, messages=HELLO) as stream:
            assert "".join([text async for text in stream.text_stream]) == "hello"

    async def test_text_and_messages_become_ids_and_text_again(self, chat_http):
        reply = (await chat_http.post("/tokenize", json={"model": "tiny", "prompt": "hi"})).json()
        assert tuple(reply["tokens"]) == ids("hi") and (reply["count"], reply["max_model_len"]) == (2, 512)
        reply = (await chat_http.post("/tokenize", json={"messages": HELLO})).json()
        assert tuple(reply["tokens"]) == ids(PROMPT)
        assert (await chat_http.post("/detokenize", json={"tokens": reply["tokens"]})).json()["prompt"] == PROMPT
