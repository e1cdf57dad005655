"""Session, priority and what to do with aborted completions, on both data routes."""

from dataclasses import replace

import httpx
import pytest

from rollout_service.config.engine import EngineConfig
from rollout_service.errors import TooEarly
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.gateway import dependencies
from rollout_service.gateway.dependencies import Services
from rollout_service.protocol.fleet import Fleet, ReplicaStatus
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.sampling import GenerateCall
from tests.unit.gateway.fakes import EchoEngine, LabelIngest, Silent, http_to

ROUTES = {"/inference/v1/generate": {"token_ids": [5, 6]}, "/v1/completions": {"prompt": [5, 6]}}


async def post(services: Services, path: str, header: str | None = None, **fields: object) -> httpx.Response:
    headers = {} if header is None else {"X-Session-Id": header}
    async with http_to(services) as http:
        return await http.post(path, json={**ROUTES[path], **fields}, headers=headers)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_session_may_be_named_in_the_body_or_in_a_header(services, engine, path):
    await post(services, path, session_id="s1", priority=-3)
    await post(services, path, header="s2")
    await post(services, path, header="s3", session_id="s3")
    reply = await post(services, path)
    assert [call.session_id for call in engine.calls] == ["s1", "s2", "s3", None]
    assert [call.priority for call in engine.calls] == [-3, 0, 0, 0] and reply.json()["attempts"] == 1


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"header": "a", "session_id": "b"}, "session_id='b'"),
        ({"priority": 2**31}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"on_abort": "drop"}, "on_abort"),
        ({"min_weight_version": 3, "weight_version": {"min_version": 3}}, "min_weight_version and weight_version are"),
        *(({"min_weight_version": version}, "version") for version in ("next", "a b", "-3", "x" * 129, -1)),
    ],
)
async def test_what_is_out_of_range_is_refused_by_name(services, engine, path, fields, named):
    reply = await post(services, path, **fields)
    assert reply.status_code == 422 and named in reply.json()["error"]["message"]
    assert engine.calls == []


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        *(
            ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {name: True}}, f"sampling_params.{name}")
            for name in ("n", "max_tokens", "temperature", "seed", "top_k", "logprobs")
        ),
        ("/inference/v1/generate", {"token_ids": [5], "priority": True}, "priority"),
        ("/inference/v1/score", {"token_ids": [5, 6], "top_logprobs": True}, "top_logprobs"),
        ("/v1/sessions", {"ttl_s": True}, "ttl_s"),
        ("/v1/weights", {"version": True, "source": {"path": "/a"}}, "version"),
        ("/v1/weights/1/commit", {"timeout_s": True}, "timeout_s"),
        ("/v1/weights/1/shared", {"transfer": "a", "batch": 0, "first": 0, "count": True, "offset": 0}, "count"),
        ("/v1/weights/rollback", {"to": True}, "to"),
        ("/v1/adapters/a/commit", {"digest": "a", "version": False}, "version"),
    ],
)
async def test_a_boolean_is_no_number(services, engine, path, body, field):
    async with http_to(services) as http:
        reply = await http.post(path, json=body)
    error = reply.json()["error"]
    assert reply.status_code == 422 and engine.calls == [], reply.text
    assert {"field": field, "problem": error["detail"]["fields"][0]["problem"]} == error["detail"]["fields"][0]
    assert "a number, not a boolean" in error["message"]


async def test_a_boolean_of_completions_means_what_it_means_to_vllm(services, engine):
    assert (await post(services, "/v1/completions", n=True, max_tokens=True)).status_code == 200
    assert (engine.calls[0].sampling.n, engine.calls[0].sampling.max_tokens) == (1, 1)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("asked", "version"), [(3, 3), ("3", 3), ("run-7/step-300", 12), ("run-7/step-9", None)])
async def test_a_version_is_asked_for_by_number_or_label(services, engine, path, asked, version):
    services = replace(services, ingest=LabelIngest({"run-7/step-300": 12}))
    reply = await post(services, path, min_weight_version=asked)
    assert reply.status_code == (404 if version is None else 200)
    assert [call.min_weight_version for call in engine.calls] == ([] if version is None else [version])


async def test_nobody_waits_for_the_number_of_a_label(services, monkeypatch):
    monkeypatch.setattr(dependencies, "INGEST_ANSWERS_S", 0.01)
    reply = await post(replace(services, ingest=Silent()), "/v1/completions", min_weight_version="step-9")
    assert reply.status_code == 503 and "the ingest has not answered" in reply.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/sessions/s/v1/chat/completions", "/v1/responses"])
async def test_a_chat_has_one_session(chat_http, scripted, path):
    headers = {} if "sessions" in path else {"X-Session-Id": "s"}
    body = {"input": "hi"} if "responses" in path else EVERY_ROUTE["/v1/chat/completions"]
    await chat_http.post("/v1/sessions", json={"session_id": "s"})
    reply = await chat_http.post(path, json={**body, "session_id": "t"}, headers=headers)
    assert reply.status_code == 422 and "differ: send one" in reply.text and not scripted.calls
    assert (await chat_http.post(path, json={**body, "session_id": "s"}, headers=headers)).status_code == 200
    assert [call.session_id for call in scripted.calls] == ["s"]


EVERY_ROUTE = {
    **ROUTES,
    "/generate": {"input_ids": [5, 6]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", EVERY_ROUTE)
@pytest.mark.parametrize(
    ("wanted", "minimum", "exact"),
    [
        ({"exact_version": 7}, None, 7),
        ({"exact_version": "golden", "min_version": None}, None, 12),
        ({"min_version": "golden"}, 12, None),
        ({"min_version": 3, "exact_version": None}, 3, None),
        ({}, None, None),
        (None, None, None),
    ],
)
async def test_weight_version_of_every_route_reaches_the_engines(chatting, path, wanted, minimum, exact):
    engine = EchoEngine()
    services = replace(
        chatting,
        ingest=LabelIngest({"golden": 12}),
        dispatcher=Dispatcher(engine, LabelIngest({}), EngineConfig()),
    )
    async with http_to(services) as http:
        reply = await http.post(path, json={**EVERY_ROUTE[path], "weight_version": wanted})
    assert reply.status_code == 200, reply.text
    assert (engine.calls[0].min_weight_version, engine.calls[0].exact_weight_version) == (minimum, exact)


@pytest.mark.parametrize("path", EVERY_ROUTE)
@pytest.mark.parametrize(
    "wanted",
    [{"exact_version": -1}, {"exact_version": 1, "min_version": 1}, {"newest": True}, 7, {"exact_version": ""}],
)
async def test_impossible_weight_version_is_refused_by_name(chat_http, path, wanted):
    reply = await chat_http.post(path, json={**EVERY_ROUTE[path], "weight_version": wanted})
    assert reply.status_code in (400, 422) and "weight_version" in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("path", EVERY_ROUTE)
@pytest.mark.parametrize("wanted", [{"exact_version": 8}, {"min_version": 9}])
async def test_version_that_nobody_serves_is_a_retryable_409(chatting, path, wanted):
    dispatcher = Dispatcher(Serving(7), Serving(7), EngineConfig(version_wait_s=0))
    async with http_to(replace(chatting, dispatcher=dispatcher)) as http:
        reply = await http.post(path, json={**EVERY_ROUTE[path], "weight_version": wanted})
    assert (reply.status_code, reply.headers["Retry-After"]) == (409, "1")
    error = reply.json()["error"]
    assert error["type"] == "VersionNotServed"
    assert error["detail"]["live"] == {"r1": 7} and error["detail"]["latest_version"] == 7


class Serving:
    """A replica that serves one version and refuses all calls for another, and the ingest that knows it."""

    def __init__(self, version: int) -> None:
        self._version = version

    async def generate(self, call: GenerateCall) -> Rollout:
        raise TooEarly("no", {"replica_id": "r1", "live_version": self._version})

    async def fleet(self) -> Fleet:
        replica = ReplicaStatus(replica_id="r1", version=self._version, state="ready")
        return Fleet(latest_version=self._version, paused=False, replicas=(replica,))
