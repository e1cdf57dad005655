"""OpenAI's Responses API: turns of sessions, and what needs a server that keeps responses."""

from typing import Any

import httpx
import openai
import pytest

from rollout_service.errors import Overloaded
from rollout_service.model.tiny import BOS, EOS, VOCABULARY
from tests.unit.gateway.chats import HELLO, PROMPT, TOOL, URL, ScriptedEngine, ids

END, UNSPOKEN = VOCABULARY.index(EOS), VOCABULARY.index(BOS)
NEXT = "\nuser: more\nassistant: "
MORE: dict[str, Any] = {"role": "user", "content": "more"}
ADD: Any = {"type": "function", **TOOL["function"], "strict": False}


@pytest.fixture
async def session(chat_http: httpx.AsyncClient) -> dict[str, Any]:
    return dict((await chat_http.post("/v1/sessions")).json())


@pytest.fixture
def agent(chat_http: httpx.AsyncClient, session: dict[str, Any]) -> openai.AsyncOpenAI:
    return sdk(chat_http, session["openai_path"])


def sdk(http: httpx.AsyncClient, path: str = "/v1") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=URL + path, api_key="EMPTY", http_client=http, max_retries=0)


async def turns(chat_http: httpx.AsyncClient, session: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    found = (await chat_http.get(f"/v1/sessions/{session['session_id']}")).json()
    return found["turns"], found["paths"]


async def said(agent: openai.AsyncOpenAI, history: list[Any], stream: bool = False, **options: Any) -> list[Any]:
    """The reply's items, as agents send them back."""
    if not stream:
        return list((await agent.responses.create(model="tiny", input=history, **options)).output)
    async with agent.responses.stream(model="tiny", input=history, **options) as events:
        return list((await events.get_final_response()).output)


class TestSessions:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_next_turn_goes_on_from_the_models_own_tokens(
        self,
        agent: openai.AsyncOpenAI,
        chat_http: httpx.AsyncClient,
        session: Any,
        scripted: ScriptedEngine,
        stream: bool,
    ) -> None:
        scripted.tokens = (*ids("he"), UNSPOKEN, *ids("llo"), END)  # a token that its text does not show
        reply = await said(agent, HELLO, stream)
        await said(agent, [*HELLO, *reply, MORE], stream)
        first, second = scripted.calls
        assert second.prompt_token_ids == (*ids(PROMPT), *scripted.tokens, *ids(NEXT))
        assert first.session_id == second.session_id == session["session_id"]
        kept, paths = await turns(chat_http, session)
        assert paths == [[0, 1]] and [turn["parent"] for turn in kept] == [None, 0]
        assert [tuple(turn["prompt_token_ids"]) for turn in kept] == [call.prompt_token_ids for call in scripted.calls]
        for turn in kept:
            assert turn["message"] == {"role": "assistant", "content": "hello"} and turn["finish_reason"] == "stop"
            assert tuple(turn["token_ids"]) == scripted.tokens and turn["logprobs"] == [-0.5] * 7
            assert [(s["version"], s["start"], s["end"], s["replica_id"]) for s in turn["spans"]] == [
                (3, 0, 1, "r1"),
                (4, 1, 7, "r1"),
            ]

    async def test_the_header_names_a_session(
        self, chat_http: httpx.AsyncClient, session: Any, scripted: ScriptedEngine
    ) -> None:
        agent = sdk(chat_http)
        named = {"X-Session-ID": session["session_id"]}
        reply = await said(agent, HELLO, extra_headers=named)
        await said(agent, [*HELLO, *reply, MORE], extra_headers=named)
        await said(agent, HELLO)
        assert (await turns(chat_http, session))[1] == [[0, 1]] and len(scripted.calls) == 3

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_tool_call_and_its_result_are_turns(
        self,
        agent: openai.AsyncOpenAI,
        chat_http: httpx.AsyncClient,
        session: Any,
        scripted: ScriptedEngine,
        stream: bool,
    ) -> None:
        scripted.text = 'so<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'  # other spaces than a template's
        reply = await said(agent, HELLO, stream, tools=[ADD])
        assert [item.type for item in reply] == ["message", "function_call"]
        result = {"type": "function_call_output", "call_id": reply[1].call_id, "output": "2"}
        await said(agent, [*HELLO, *reply, result], stream, tools=[ADD])
        first, second = scripted.calls
        before = (*first.prompt_token_ids, *ids(scripted.text), END)
        assert second.prompt_token_ids == (*before, *ids("\ntool: 2\nassistant: "))
        kept, paths = await turns(chat_http, session)
        assert paths == [[0, 1]] and kept[0]["message"]["tool_calls"][0]["function"]["name"] == "add"

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("arguments", ['["a"]', "null", "{a}", '{"a": "'])
    async def test_arguments_that_are_no_object_are_continued(
        self,
        agent: openai.AsyncOpenAI,
        chat_http: httpx.AsyncClient,
        session: Any,
        scripted: ScriptedEngine,
        arguments: str,
        stream: bool,
    ) -> None:
        scripted.text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
        reply = await said(agent, HELLO, stream, tools=[ADD])
        await said(agent, [*HELLO, *reply, MORE], stream, tools=[ADD])
        first, second = scripted.calls
        assert second.prompt_token_ids == (*first.prompt_token_ids, *ids(scripted.text), END, *ids(NEXT))
        assert (await turns(chat_http, session))[1] == [[0, 1]]

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("tools", [[], [ADD]], ids=["no tools", "tools"])
    async def test_a_reply_without_text_is_a_message(
        self,
        agent: openai.AsyncOpenAI,
        chat_http: httpx.AsyncClient,
        session: Any,
        scripted: ScriptedEngine,
        tools: list[Any],
        stream: bool,
    ) -> None:
        scripted.text = ""
        reply = await said(agent, HELLO, stream, tools=tools)
        assert [(item.type, item.role, item.content, item.status) for item in reply] == [
            ("message", "assistant", [], "completed")
        ]
        await said(agent, [*HELLO, *reply, MORE], stream, tools=tools)
        first, second = scripted.calls
        assert second.prompt_token_ids == (*first.prompt_token_ids, END, *ids(NEXT))
        assert (await turns(chat_http, session))[1] == [[0, 1]]

    async def test_changed_history_begins_a_branch(
        self, agent: openai.AsyncOpenAI, chat_http: httpx.AsyncClient, session: Any
    ) -> None:
        reply = await said(agent, HELLO)
        await said(agent, [*HELLO, *reply, MORE])
        await said(agent, [*HELLO, {"role": "assistant", "content": "bye"}, MORE])
        assert (await turns(chat_http, session))[1] == [[0, 1], [2]]

    @pytest.mark.parametrize(("text", "content"), [("", []), ("hello", "hello")], ids=["no text", "text as a string"])
    async def test_a_reply_in_a_long_form_is_continued(
        self,
        agent: openai.AsyncOpenAI,
        chat_http: httpx.AsyncClient,
        session: Any,
        scripted: ScriptedEngine,
        text: str,
        content: Any,
    ) -> None:
        scripted.tokens = (UNSPOKEN, *ids(text), END)
        await said(agent, HELLO)
        reply = {"type": "message", "role": "assistant", "id": "m1", "status": "completed", "content": content}
        await said(agent, [*HELLO, reply, MORE])
        assert scripted.calls[1].prompt_token_ids == (*ids(PROMPT), *scripted.tokens, *ids(NEXT))
        assert (await turns(chat_http, session))[1] == [[0, 1]]

    async def test_chats_and_responses_share_a_session(
        self, agent: openai.AsyncOpenAI, chat_http: httpx.AsyncClient, session: Any
    ) -> None:
        await said(agent, [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}])
        history = [*HELLO, {"role": "assistant", "content": "hello"}, MORE]
        await agent.chat.completions.create(model="tiny", messages=history)
        assert (await turns(chat_http, session))[1] == [[0, 1]]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_refused_turn_is_no_turn(
        self, chat_http: httpx.AsyncClient, session: Any, scripted: ScriptedEngine, stream: bool
    ) -> None:
        scripted.error = Overloaded("full")
        body = {"model": "tiny", "input": "hi", "stream": stream}
        reply = await chat_http.post(session["openai_path"] + "/responses", json=body)
        assert reply.status_code == 503 and reply.json()["error"]["type"] == "Overloaded"
        assert (await turns(chat_http, session))[0] == []

    async def test_there_must_be_such_a_session(self, chat_http: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
        reply = await chat_http.post("/v1/sessions/none/v1/responses", json={"model": "tiny", "input": "hi"})
        assert reply.status_code == 404 and "no session none" in reply.json()["error"]["message"]
        assert not scripted.calls


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("previous_response_id", "resp_1", "previous_response_id: responses are not kept here"),
        ("store", True, "store: responses are not kept here"),
        ("background", True, "background: responses are not kept here"),
        ("previous_input_messages", [{"role": "user", "content": "hi"}], "previous_input_messages: responses are"),
        ("tools", [{"type": "web_search"}], "tools: web_search: this service runs no tools"),
        ("tools", [ADD, {"type": "code_interpreter", "container": {"type": "auto"}}], "tools: code_interpreter: this"),
    ],
)
async def test_what_needs_a_servers_store_or_tools_is_refused(
    chat_http: httpx.AsyncClient, scripted: ScriptedEngine, field: str, value: object, named: str
) -> None:
    reply = await chat_http.post("/v1/responses", json={"model": "tiny", "input": "hi", field: value})
    assert reply.status_code == 400 and named in reply.json()["error"]["message"], reply.text
    assert reply.json()["error"]["detail"] == {"not_implemented": [named.split(": ")[field == "tools"]]}
    assert not scripted.calls
