"""Sessions over HTTP: agents with unchanged SDKs, and the tokens that a trainer reads afterwards."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai
import pytest
from fastapi.responses import StreamingResponse

from rollout_service.client import RolloutClient, SyncRolloutClient
from rollout_service.errors import NotFound, Overloaded, VersionConflict
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from rollout_service.gateway.openai.exchange import SessionTurn
from rollout_service.gateway.openai.serving import LazyServing
from rollout_service.gateway.openai.sessions import read_session
from rollout_service.model.tiny import BOS, EOS, VOCABULARY
from rollout_service.protocol.rollout import Completion, Rollout
from rollout_service.protocol.sampling import GenerateCall
from rollout_service.protocol.sessions import OpenSession, Session, Turn
from rollout_service.sessions.store import SessionStore
from tests.support.clock import Clock
from tests.unit.client.service import Service, serving_in_a_thread
from tests.unit.gateway.chats import HELLO, PROMPT, TOOL, URL, config_of, ids
from tests.unit.gateway.fakes import http_to
from tests.unit.sessions.test_store import turn as turn_of

END, UNSPOKEN = VOCABULARY.index(EOS), VOCABULARY.index(BOS)
NEXT = "\nuser: more\nassistant: "
MORE: dict[str, Any] = {"role": "user", "content": "more"}
ADD: Any = {"type": "function", **TOOL["function"], "strict": False}


@dataclass
class Agent:
    """An agent on one of OpenAI's two APIs, with its unchanged SDK."""

    sdk: openai.AsyncOpenAI
    api: str
    stream: bool = False

    async def say(self, history: list[Any], *, tools: bool = False, **options: Any) -> list[Any]:
        """Return the reply's messages or items, as agents send them back."""
        if self.api == "responses":
            asked = {"model": "tiny", "input": history, **({"tools": [ADD]} if tools else {}), **options}
            if not self.stream:
                return list((await self.sdk.responses.create(**asked)).output)
            async with self.sdk.responses.stream(**asked) as events:
                return list((await events.get_final_response()).output)
        asked = {"model": "tiny", "messages": history, **({"tools": [TOOL]} if tools else {}), **options}
        if self.stream:
            async with self.sdk.chat.completions.stream(**asked) as events:
                reply = await events.get_final_completion()
        else:
            reply = await self.sdk.chat.completions.create(**asked)
        return [reply.choices[0].message.model_dump(exclude_none=True)]

    def result_of(self, reply: list[Any]) -> dict[str, Any]:
        """Return the result of the reply's tool call."""
        if self.api == "responses":
            return {"type": "function_call_output", "call_id": reply[-1].call_id, "output": "2"}
        return {"role": "tool", "tool_call_id": reply[-1]["tool_calls"][0]["id"], "content": "2"}


@pytest.fixture
async def session(chat_http: httpx.AsyncClient) -> dict[str, Any]:
    return dict((await chat_http.post("/v1/sessions")).json())


@pytest.fixture
def sdk(sdk: openai.AsyncOpenAI, session: dict[str, Any]) -> openai.AsyncOpenAI:
    return sdk.with_options(base_url=URL + session["openai_path"])


@pytest.fixture(params=["chat", "responses"])
def agent(request: pytest.FixtureRequest, sdk: openai.AsyncOpenAI) -> Agent:
    return Agent(sdk, request.param)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def any_agent(request: pytest.FixtureRequest, agent: Agent) -> Agent:
    agent.stream = request.param
    return agent


async def turns(chat_http: httpx.AsyncClient, session: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    found = (await chat_http.get(f"/v1/sessions/{session['session_id']}")).json()
    return found["turns"], found["paths"]


async def test_the_next_turn_goes_on_from_the_models_own_tokens(any_agent, chat_http, session, scripted):
    scripted.tokens = (*ids("he"), UNSPOKEN, *ids("llo"), END)  # a token that its text does not show
    reply = await any_agent.say(HELLO)
    await any_agent.say([*HELLO, *reply, MORE])
    first, second = scripted.calls
    assert second.prompt_token_ids == (*ids(PROMPT), *scripted.tokens, *ids(NEXT))
    assert first.session_id == second.session_id == session["session_id"]
    kept, paths = await turns(chat_http, session)
    assert paths == [[0, 1]] and [turn["parent"] for turn in kept] == [None, 0]
    assert [tuple(turn["prompt_token_ids"]) for turn in kept] == [c.prompt_token_ids for c in scripted.calls]
    for turn in kept:
        assert turn["message"] == {"role": "assistant", "content": "hello"} and turn["finish_reason"] == "stop"
        assert tuple(turn["token_ids"]) == scripted.tokens and turn["logprobs"] == [-0.5] * 7
        assert [(s["version"], s["start"], s["end"], s["replica_id"]) for s in turn["spans"]] == [
            (3, 0, 1, "r1"),
            (4, 1, 7, "r1"),
        ]


async def test_a_tool_call_and_its_result_are_turns(any_agent, chat_http, session, scripted):
    scripted.text = 'so<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'  # other spaces than a template's
    reply = await any_agent.say(HELLO, tools=True)
    await any_agent.say([*HELLO, *reply, any_agent.result_of(reply)], tools=True)
    first, second = scripted.calls
    before = (*first.prompt_token_ids, *ids(scripted.text), END)
    assert second.prompt_token_ids == (*before, *ids("\ntool: 2\nassistant: "))
    kept, paths = await turns(chat_http, session)
    assert paths == [[0, 1]] and kept[0]["message"]["tool_calls"][0]["function"]["name"] == "add"


def call_of(arguments: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


async def test_the_client_gives_an_agent_its_address(chat_http, chatting):
    transport = httpx.ASGITransport(app=create_app(chatting))
    async with RolloutClient(URL, transport=transport) as client:
        async with client.session("mine") as session:
            agent = openai.AsyncOpenAI(base_url=session.openai_base_url, api_key="EMPTY", http_client=chat_http)
            await Agent(agent, "chat").say(HELLO)
            assert session.anthropic_base_url == f"{URL}/v1/sessions/mine"
            [[turn]] = (await session.trajectory()).branches()
            assert turn.prompt_token_ids == ids(PROMPT) and turn.message == {"role": "assistant", "content": "hello"}
        await session.close()  # once more
    assert (await chat_http.get("/v1/sessions/mine")).status_code == 404


def test_the_blocking_client_gives_a_blocking_agent_its_address(chatting):
    service = Service()
    service.app = create_app(chatting)
    with serving_in_a_thread(service), SyncRolloutClient(service.url) as client:
        with client.session("mine") as session:
            with openai.OpenAI(base_url=session.openai_base_url, api_key="EMPTY", max_retries=0) as agent:
                reply = agent.chat.completions.create(model="tiny", messages=HELLO)
            assert reply.choices[0].message.content == "hello" and session.session_id == "mine"
            [[turn]] = session.trajectory().branches()
            assert turn.prompt_token_ids == ids(PROMPT) and turn.token_ids == (*ids("hello"), END)
            with pytest.raises(VersionConflict), client.session("mine"):
                pass
        with pytest.raises(NotFound, match="no session mine"):
            session.trajectory()
        session.close()  # once more


async def test_a_cut_call_that_an_agent_rewrites_branches(sdk, chat_http, session, scripted):
    scripted.text = call_of('{"a": 1}') + call_of('{"a": 1}')
    scripted.cut_after = len(scripted.text) - len(": 1}}</tool_call>")
    asked: Any = {"model": "tiny", "tools": [TOOL]}
    async with sdk.chat.completions.stream(messages=HELLO, **asked) as events:
        async for _ in events:
            pass
        reply = events.current_completion_snapshot.choices[0].message.model_dump(exclude_none=True)
    whole, cut = (call["function"] for call in reply["tool_calls"])
    assert whole["arguments"] == '{"a": 1}' and cut["arguments"] == '{"a"'
    cut["arguments"] = '{"INVALID_JSON": "{\\"a\\""}'  # as pydantic-ai sends it back
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in reply["tool_calls"]]
    history: list[Any] = [*HELLO, reply, *results]
    answer = await sdk.chat.completions.with_raw_response.create(messages=history, **asked)
    assert answer.headers["X-Session-Branch"] == "other_history"
    kept, paths = await turns(chat_http, session)
    assert paths == [[0], [1]] and [turn["branch"] for turn in kept] == [None, "other_history"]
    assert tuple(kept[1]["prompt_token_ids"]) == scripted.calls[1].prompt_token_ids


async def test_anthropics_sdk_talks_in_a_session(anthropics, chat_http, session, scripted):
    scripted.tokens = (*ids("he"), UNSPOKEN, *ids("llo"), END)
    agent = anthropics.with_options(base_url=URL + session["anthropic_path"])
    reply = await agent.messages.create(model="tiny", max_tokens=9, messages=HELLO)
    history = [*HELLO, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "more"}]
    await agent.messages.create(model="tiny", max_tokens=9, messages=history)
    assert scripted.calls[1].prompt_token_ids == (*ids(PROMPT), *scripted.tokens, *ids(NEXT))
    assert (await turns(chat_http, session))[1] == [[0, 1]]


async def test_an_agent_finds_models_and_counts_tokens_at_its_address(sdk, chat_http, session, scripted):
    assert [model.id for model in (await sdk.models.list()).data] == ["tiny", "org/tiny"]
    path = session["anthropic_path"] + "/v1/messages/count_tokens"
    counted = await chat_http.post(path, json={"model": "tiny", "messages": HELLO})
    assert counted.json()["input_tokens"] == len(PROMPT)
    assert not scripted.calls and (await turns(chat_http, session))[0] == []
    assert (await chat_http.get("/v1/sessions/none/v1/models")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat/completions", {"messages": HELLO}), ("responses", {"input": HELLO})],
    ids=["chat", "responses"],
)
async def test_the_header_names_an_open_session_or_only_a_replica(chat_http, session, scripted, path, body):
    for name in (session["session_id"], "another"):
        reply = await chat_http.post(f"/v1/{path}", json={"model": "tiny", **body}, headers={"X-Session-ID": name})
        assert reply.status_code == 200
    assert [call.session_id for call in scripted.calls] == [session["session_id"], "another"]
    assert len((await turns(chat_http, session))[0]) == 1
    assert (await chat_http.get("/v1/sessions/another")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_may_take_longer_than_its_session_lives(chatting, scripted, monkeypatch, stream):
    clock, asked, goes_on = Clock(), asyncio.Event(), asyncio.Event()
    sessions = SessionStore(clock.monotonic)
    generate = scripted.generate

    async def wait(call: GenerateCall) -> Rollout:
        asked.set()
        await goes_on.wait()
        return await generate(call)

    monkeypatch.setattr(scripted, "generate", wait)
    async with http_to(replace(chatting, sessions=sessions)) as http:
        name = await sessions.open(OpenSession(ttl_s=10.0))
        path, body = f"/v1/sessions/{name}/v1/chat/completions", {"model": "tiny", "messages": HELLO, "stream": stream}
        asking = asyncio.create_task(http.post(path, json=body))
        await asked.wait()
        clock.go_on(100.0)
        goes_on.set()
        assert (await asking).status_code == 200 and await sessions.num_turns(name) == 1
        scripted.error = Overloaded("full")
        clock.go_on(9.0)
        assert (await http.post(path, json=body)).status_code == 503
        clock.go_on(11.0)
        assert (await http.post(path, json=body)).status_code == 404


async def test_vllms_own_chats_are_in_no_session(chatting, model):
    """vLLM renders some at a gateway's first request without thinking, to find out what the chat template knows."""
    clock = Clock()
    sessions = SessionStore(clock.monotonic)
    await sessions.open(OpenSession(session_id="s", ttl_s=10.0))
    for messages in (HELLO, [*HELLO, {"role": "assistant", "content": "hello"}, MORE]):
        gateway = replace(chatting, sessions=sessions, chats=LazyServing(config_of(model)))
        body = {"model": "tiny", "max_tokens": 9, "messages": messages, "thinking": {"type": "disabled"}}
        async with http_to(gateway) as http:
            reply = await http.post("/v1/sessions/s/v1/messages", json=body)
        assert reply.status_code == 200 and "X-Session-Branch" not in reply.headers, reply.text
    clock.go_on(11.0)
    with pytest.raises(NotFound):
        await sessions.num_turns("s")


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_a_stream_tells_that_its_turn_was_not_kept(chatting, chat_http, session, scripted, monkeypatch, path):
    generate = scripted.generate

    async def delete(call: GenerateCall) -> Rollout:
        await chatting.sessions.close(session["session_id"])
        return await generate(call)

    monkeypatch.setattr(scripted, "generate", delete)
    asked = {"input": "hi"} if path == "responses" else {"messages": HELLO, "max_tokens": 9}
    body = {"model": "tiny", "stream": True, **asked}
    reply = await chat_http.post(f"{session['anthropic_path']}/v1/{path}", json=body)
    assert reply.status_code == 200 and reply.text.count('"error": {"type": "NotFound"') == 1, reply.text
    assert path != "chat/completions" or reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_has_the_reasoning_of_its_reply(chatting, model, scripted, stream):
    scripted.text = "why</think>so"
    async with http_to(replace(chatting, chats=LazyServing(config_of(model, reasoning_parser="qwen3")))) as http:
        await http.post("/v1/sessions", json={"session_id": "s"})
        await http.post("/v1/sessions/s/v1/chat/completions", json={"messages": HELLO, "stream": stream})
        [turn] = (await http.get("/v1/sessions/s")).json()["turns"]
    assert turn["message"] == {"role": "assistant", "reasoning": "why", "content": "so"}


async def test_choices_are_recorded_with_one_prompt_object():
    made: list[Turn] = []

    class Sessions(SessionStore):
        async def add(self, session_id: str, messages: Any, context: object, turns: Sequence[Turn]) -> None:
            made.extend(turns)

    sessions = Sessions()
    turn = await SessionTurn.of(await sessions.open(OpenSession()), sessions)
    choices = tuple(
        Completion(index=index, token_ids=(), logprobs=(), finish_reason="stop", spans=()) for index in range(3)
    )
    rollout = Rollout(request_id="r", prompt_token_ids=(5, 6), completions=choices, replica_id="a")
    await turn.end([rollout], [{"role": "assistant", "content": text} for text in "abc"])
    assert [each.message["content"] for each in made] == ["a", "b", "c"]
    assert all(each.prompt_token_ids is rollout.prompt_token_ids for each in made)


async def session_of(services: Services, *turns: Turn) -> str:
    name = await services.sessions.open(OpenSession())
    for each in turns:
        await services.sessions.add(name, HELLO, None, [each])
    return name


async def parts_of(services: Services, name: str) -> AsyncIterator[str]:
    """Yield the parts of the reply to a trainer that reads the session."""
    reply = await read_session(name, services)
    assert isinstance(reply, StreamingResponse)
    async for part in reply.body_iterator:
        assert isinstance(part, str)
        yield part


async def test_a_session_is_read_as_it_was_at_the_request(services):
    name = await session_of(services, turn_of("a"), turn_of("b", (1, 97, 7), parent=0), turn_of("c", (5,), parent=0))
    parts = parts_of(services, name)
    text = await anext(parts)
    await services.sessions.add(name, HELLO, None, [turn_of("d", parent=1)])
    await services.sessions.close(name)
    text += "".join([part async for part in parts])
    session = Session.model_validate_json(text)
    assert session.paths == ((0, 1), (0, 2)) and [each.index for each in session.turns] == [0, 1, 2]
    about, turns = session.model_dump_json(exclude={"turns"}), [each.model_dump_json() for each in session.turns]
    assert text == f'{about[:-1]},"turns":[{",".join(turns)}]}}'
    assert session.branches() == [(session.turns[0], session.turns[leaf]) for leaf in (1, 2)]


async def test_other_requests_are_answered_while_a_session_is_read(services):
    name, ticks = await session_of(services, turn_of("a"), turn_of("b"), turn_of("c")), 0

    async def read() -> list[str]:
        return [part async for part in parts_of(services, name)]

    reading = asyncio.create_task(read())
    while not reading.done():
        await asyncio.sleep(0)
        ticks += 1
    assert ticks >= 2 * 3  # each path and each turn


async def test_reading_a_session_does_not_hold_its_reply(services):
    """Each prompt is a prefix of the next: together they are many times what the store keeps."""
    turns, prompt = list[Turn](), tuple[int, ...]((1,))
    for index in range(128):
        turns.append(turn_of("\U00010000" * 32, prompt, parent=index - 1 if index else None))
        prompt = (*prompt, *turns[-1].token_ids)
    name = await session_of(services, *turns)
    tracemalloc.start()
    try:
        size = sum([len(part) async for part in parts_of(services, name)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size / 2


async def test_a_session_has_a_name_that_stays_in_a_url(chat_http):
    for name, status in (("..", 422), ("a/b", 422), (".a", 200)):
        assert (await chat_http.post("/v1/sessions", json={"session_id": name})).status_code == status


async def test_a_session_ends_when_it_is_deleted(chat_http, session):
    path = f"/v1/sessions/{session['session_id']}"
    assert (await chat_http.post("/v1/sessions", json={"session_id": session["session_id"]})).status_code == 409
    assert (await chat_http.delete(path)).status_code == 204
    for reply in (
        await chat_http.get(path),
        await chat_http.delete(path),
        await chat_http.post(f"{path}/v1/chat/completions", json={"model": "tiny", "messages": HELLO}),
    ):
        assert reply.status_code == 404 and reply.json()["error"]["type"] == "NotFound"


class TestResponses:
    """Turns of OpenAI's Responses API, whose replies are items."""

    @pytest.fixture
    def agent(self, sdk: openai.AsyncOpenAI) -> Agent:
        return Agent(sdk, "responses")

    @pytest.mark.parametrize("tools", [False, True], ids=["no tools", "tools"])
    async def test_a_reply_without_text_is_a_message(self, any_agent, chat_http, session, scripted, tools):
        scripted.text = ""
        reply = await any_agent.say(HELLO, tools=tools)
        assert [(item.type, item.role, item.content, item.status) for item in reply] == [
            ("message", "assistant", [], "completed")
        ]
        await any_agent.say([*HELLO, *reply, MORE], tools=tools)
        first, second = scripted.calls
        assert second.prompt_token_ids == (*first.prompt_token_ids, END, *ids(NEXT))
        assert (await turns(chat_http, session))[1] == [[0, 1]]

    @pytest.mark.parametrize(("text", "content"), [("", []), ("hello", "hello")], ids=["no text", "text as a string"])
    async def test_a_reply_in_a_long_form_is_continued(self, agent, chat_http, session, scripted, text, content):
        scripted.tokens = (UNSPOKEN, *ids(text), END)
        await agent.say(HELLO)
        reply = {"type": "message", "role": "assistant", "id": "m1", "status": "completed", "content": content}
        await agent.say([*HELLO, reply, MORE])
        assert scripted.calls[1].prompt_token_ids == (*ids(PROMPT), *scripted.tokens, *ids(NEXT))
        assert (await turns(chat_http, session))[1] == [[0, 1]]

    async def test_chats_and_responses_share_a_session(self, agent, chat_http, session):
        await agent.say([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}])
        await Agent(agent.sdk, "chat").say([*HELLO, {"role": "assistant", "content": "hello"}, MORE])
        assert (await turns(chat_http, session))[1] == [[0, 1]]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_refused_turn_is_no_turn(self, chat_http, session, scripted, stream):
        scripted.error = Overloaded("full")
        body = {"model": "tiny", "input": "hi", "stream": stream}
        reply = await chat_http.post(session["openai_path"] + "/responses", json=body)
        assert reply.status_code == 503 and reply.json()["error"]["type"] == "Overloaded"
        assert (await turns(chat_http, session))[0] == []


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("previous_response_id", "resp_1", "previous_response_id: responses are not kept here"),
        ("store", True, "store: responses are not kept here"),
        ("background", True, "background: responses are not kept here"),
        ("previous_input_messages", [{"role": "user", "content": "hi"}], "previous_input_messages: responses are"),
        ("tools", [{"type": "web_search"}], "tools: web_search: this service runs no tools"),
        ("tools", [ADD, {"type": "code_interpreter", "container": {"type": "auto"}}], "tools: code_interpreter: this"),
        ("tool_choice", {"type": "allowed_tools", "mode": "required", "tools": []}, "tool_choice: type=allowed_tools"),
    ],
)
async def test_what_needs_a_servers_store_or_tools_is_refused(chat_http, scripted, field, value, named):
    reply = await chat_http.post("/v1/responses", json={"model": "tiny", "input": "hi", field: value})
    assert reply.status_code == 400 and named in reply.json()["error"]["message"], reply.text
    assert reply.json()["error"]["detail"] == {"not_implemented": [named.split(": ")[field == "tools"]]}
    assert not scripted.calls
