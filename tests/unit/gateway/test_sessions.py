"""Sessions over HTTP: agents with unchanged SDKs, and the tokens that a trainer reads afterwards."""

from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from rollout_service.client import RolloutClient, SyncRolloutClient
from rollout_service.errors import NotFound, VersionConflict
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from rollout_service.model.tiny import BOS, EOS, VOCABULARY
from tests.unit.client.service import Service, serving_in_a_thread
from tests.unit.gateway.chats import HELLO, PROMPT, TOOL, URL, ScriptedEngine, ids

END, UNSPOKEN = VOCABULARY.index(EOS), VOCABULARY.index(BOS)
NEXT = "\nuser: more\nassistant: "


@pytest.fixture
async def session(chat_http: httpx.AsyncClient) -> dict[str, Any]:
    return dict((await chat_http.post("/v1/sessions")).json())


@pytest.fixture
def agent(chat_http: httpx.AsyncClient, session: dict[str, Any]) -> openai.AsyncOpenAI:
    base_url = URL + session["openai_path"]
    return openai.AsyncOpenAI(base_url=base_url, api_key="EMPTY", http_client=chat_http, max_retries=0)


async def turns(chat_http: httpx.AsyncClient, session: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    found = (await chat_http.get(f"/v1/sessions/{session['session_id']}")).json()
    return found["turns"], found["paths"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_goes_on_from_the_models_own_tokens(
    agent: openai.AsyncOpenAI, chat_http: httpx.AsyncClient, session: Any, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.tokens = (*ids("he"), UNSPOKEN, *ids("llo"), END)  # a token that its text does not show
    reply = await said(agent, HELLO, stream)
    assert reply == {"role": "assistant", "content": "hello"}
    await said(agent, [*HELLO, reply, {"role": "user", "content": "more"}], stream)
    first, second = scripted.calls
    assert second.prompt_token_ids == (*ids(PROMPT), *scripted.tokens, *ids(NEXT))
    assert first.session_id == second.session_id == session["session_id"]
    kept, paths = await turns(chat_http, session)
    assert paths == [[0, 1]] and [turn["parent"] for turn in kept] == [None, 0]
    assert [tuple(turn["prompt_token_ids"]) for turn in kept] == [c.prompt_token_ids for c in scripted.calls]
    for turn in kept:
        assert tuple(turn["token_ids"]) == scripted.tokens and len(turn["logprobs"]) == len(scripted.tokens)
        assert [(s["version"], s["start"], s["end"], s["replica_id"]) for s in turn["spans"]] == [
            (3, 0, 1, "r1"),
            (4, 1, 7, "r1"),
        ]


async def said(agent: openai.AsyncOpenAI, messages: list[Any], stream: bool) -> dict[str, Any]:
    """The reply, as agents send it back."""
    if not stream:
        reply = await agent.chat.completions.create(model="tiny", messages=messages)
        return {"role": "assistant", "content": reply.choices[0].message.content}
    chunks = await agent.chat.completions.create(model="tiny", messages=messages, stream=True)
    text = [choice.delta.content or "" async for chunk in chunks for choice in chunk.choices]
    return {"role": "assistant", "content": "".join(text)}


async def test_the_client_gives_an_agent_its_address(chat_http: httpx.AsyncClient, chatting: Services) -> None:
    transport = httpx.ASGITransport(app=create_app(chatting))
    async with RolloutClient(URL, transport=transport) as client:
        async with client.session("mine") as session:
            agent = openai.AsyncOpenAI(base_url=session.openai_base_url, api_key="EMPTY", http_client=chat_http)
            await said(agent, HELLO, stream=False)
            assert session.anthropic_base_url == f"{URL}/v1/sessions/mine"
            [[turn]] = (await session.trajectory()).branches()
            assert turn.prompt_token_ids == ids(PROMPT) and turn.message == {"role": "assistant", "content": "hello"}
        await session.close()  # once more
    assert (await chat_http.get("/v1/sessions/mine")).status_code == 404


def test_the_blocking_client_gives_a_blocking_agent_its_address(chatting: Services) -> None:
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


async def test_changed_history_begins_a_branch(
    agent: openai.AsyncOpenAI, chat_http: httpx.AsyncClient, session: Any, scripted: ScriptedEngine
) -> None:
    reply = await said(agent, HELLO, stream=False)
    more = {"role": "user", "content": "more"}
    await said(agent, [*HELLO, reply, more], stream=False)
    await said(agent, [*HELLO, {**reply, "content": "bye"}, more], stream=False)
    assert scripted.calls[2].prompt_token_ids == (*ids(PROMPT), *ids("bye"), END, *ids(NEXT))
    kept, paths = await turns(chat_http, session)
    assert paths == [[0, 1], [2]] and kept[2]["parent"] is None


async def test_a_tool_call_and_its_result_are_turns(
    agent: openai.AsyncOpenAI, chat_http: httpx.AsyncClient, session: Any, scripted: ScriptedEngine
) -> None:
    scripted.text = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'  # other spaces than a template's
    asked: Any = {"model": "tiny", "tools": [TOOL]}
    reply = (await agent.chat.completions.create(messages=HELLO, **asked)).choices[0].message
    assert reply.tool_calls is not None
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "2"}
    history = [*HELLO, reply.model_dump(exclude_none=True), result]
    await agent.chat.completions.create(messages=history, **asked)
    first, second = scripted.calls
    before = (*first.prompt_token_ids, *ids(scripted.text), END)
    assert second.prompt_token_ids == (*before, *ids("\ntool: 2\nassistant: "))
    assert (await turns(chat_http, session))[1] == [[0, 1]]


def call_of(arguments: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ['["a"]', "null", "3", '"a"', "{a}", '{"a": "'])
async def test_arguments_that_are_no_object_are_continued(
    agent: openai.AsyncOpenAI,
    chat_http: httpx.AsyncClient,
    session: Any,
    scripted: ScriptedEngine,
    arguments: str,
    stream: bool,
) -> None:
    scripted.text = call_of(arguments)
    asked: Any = {"model": "tiny", "tools": [TOOL]}
    if stream:
        async with agent.chat.completions.stream(messages=HELLO, **asked) as events:
            reply = (await events.get_final_completion()).choices[0].message
    else:
        reply = (await agent.chat.completions.create(messages=HELLO, **asked)).choices[0].message
    more = {"role": "user", "content": "more"}
    await agent.chat.completions.create(messages=[*HELLO, reply.model_dump(exclude_none=True), more], **asked)
    first, second = scripted.calls
    assert second.prompt_token_ids == (*first.prompt_token_ids, *ids(scripted.text), END, *ids(NEXT))
    assert (await turns(chat_http, session))[1] == [[0, 1]]


async def test_a_cut_call_that_an_agent_rewrites_branches(
    agent: openai.AsyncOpenAI, chat_http: httpx.AsyncClient, session: Any, scripted: ScriptedEngine
) -> None:
    scripted.text = call_of('{"a": 1}') + call_of('{"a": 1}')
    scripted.cut_after = len(scripted.text) - len(": 1}}</tool_call>")
    asked: Any = {"model": "tiny", "tools": [TOOL]}
    async with agent.chat.completions.stream(messages=HELLO, **asked) as events:
        async for _ in events:
            pass
        reply = events.current_completion_snapshot.choices[0].message.model_dump(exclude_none=True)
    whole, cut = (call["function"] for call in reply["tool_calls"])
    assert whole["arguments"] == '{"a": 1}' and cut["arguments"] == '{"a"'
    cut["arguments"] = '{"INVALID_JSON": "{\\"a\\""}'  # as pydantic-ai sends it back
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in reply["tool_calls"]]
    history: list[Any] = [*HELLO, reply, *results]
    answer = await agent.chat.completions.with_raw_response.create(messages=history, **asked)
    assert answer.headers["X-Session-Branch"] == "other_history"
    kept, paths = await turns(chat_http, session)
    assert paths == [[0], [1]] and [turn["branch"] for turn in kept] == [None, "other_history"]
    assert tuple(kept[1]["prompt_token_ids"]) == scripted.calls[1].prompt_token_ids


async def test_anthropics_sdk_talks_in_a_session(
    chatting: Services, chat_http: httpx.AsyncClient, session: Any, scripted: ScriptedEngine
) -> None:
    scripted.tokens = (*ids("he"), UNSPOKEN, *ids("llo"), END)
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=create_app(chatting)))
    agent = anthropic.AsyncAnthropic(
        base_url=URL + session["anthropic_path"], api_key="EMPTY", http_client=http, max_retries=0
    )
    reply = await agent.messages.create(model="tiny", max_tokens=9, messages=HELLO)
    history = [*HELLO, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "more"}]
    await agent.messages.create(model="tiny", max_tokens=9, messages=history)
    assert scripted.calls[1].prompt_token_ids == (*ids(PROMPT), *scripted.tokens, *ids(NEXT))
    assert (await turns(chat_http, session))[1] == [[0, 1]]


async def test_an_agent_finds_models_and_counts_tokens_at_its_address(
    agent: openai.AsyncOpenAI, chat_http: httpx.AsyncClient, session: Any, scripted: ScriptedEngine
) -> None:
    assert [model.id for model in (await agent.models.list()).data] == ["tiny", "org/tiny"]
    path = session["anthropic_path"] + "/v1/messages/count_tokens"
    counted = await chat_http.post(path, json={"model": "tiny", "messages": HELLO})
    assert counted.json()["input_tokens"] == len(PROMPT)
    assert not scripted.calls and (await turns(chat_http, session))[0] == []
    assert (await chat_http.get("/v1/sessions/none/v1/models")).status_code == 404


async def test_the_header_names_an_open_session_or_only_a_replica(
    chat_http: httpx.AsyncClient, session: Any, scripted: ScriptedEngine
) -> None:
    for name in (session["session_id"], "another"):
        body = {"model": "tiny", "messages": HELLO}
        reply = await chat_http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": name})
        assert reply.status_code == 200
    assert [call.session_id for call in scripted.calls] == [session["session_id"], "another"]
    assert len((await turns(chat_http, session))[0]) == 1
    assert (await chat_http.get("/v1/sessions/another")).status_code == 404


async def test_a_session_ends_when_it_is_deleted(chat_http: httpx.AsyncClient, session: Any) -> None:
    path = f"/v1/sessions/{session['session_id']}"
    assert (await chat_http.post("/v1/sessions", json={"session_id": session["session_id"]})).status_code == 409
    assert (await chat_http.delete(path)).status_code == 204
    for reply in (
        await chat_http.get(path),
        await chat_http.delete(path),
        await chat_http.post(f"{path}/v1/chat/completions", json={"model": "tiny", "messages": HELLO}),
    ):
        assert reply.status_code == 404 and reply.json()["error"]["type"] == "NotFound"
