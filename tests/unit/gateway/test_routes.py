"""What every route does before it is asked: who may call it, and how large and of what form a body may be."""

import json
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_network
from typing import Any, get_args

import httpx
import pytest
from fastapi.routing import APIRoute

from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from rollout_service.gateway.routes import GuardedRoute, OpenRoute, PromptsRoute
from rollout_service.protocol.base import Frozen
from rollout_service.web.auth import Authorizer
from rollout_service.web.errors import PROBLEMS_LISTED, FieldProblem, validation_error
from tests.unit.gateway.fakes import call_and_leave

OPEN = {
    ("POST", "/inference/v1/generate"),
    ("POST", "/inference/v1/score"),
    ("POST", "/v1/completions"),
    ("POST", "/generate"),
    ("GET", "/health_generate"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("POST", "/skyrl/v1/generate"),
    ("POST", "/infer"),
    ("POST", "/get_sequence_logprobs"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/sessions"),
    ("GET", "/v1/sessions/{session_id}"),
    ("DELETE", "/v1/sessions/{session_id}"),
    ("POST", "/v1/sessions/{session_id}/v1/chat/completions"),
    ("POST", "/v1/sessions/{session_id}/v1/responses"),
    ("POST", "/v1/sessions/{session_id}/v1/messages"),
    ("POST", "/v1/sessions/{session_id}/v1/messages/count_tokens"),
    ("GET", "/v1/sessions/{session_id}/v1/models"),
}
OPEN |= {
    (method, f"/api/v1/{path}")
    for method, paths in {
        "GET": ("healthz", "get_server_capabilities", "samplers/{sampler_id}"),
        "POST": (
            *("client/config", "client/dynamic_config", "create_session", "session_heartbeat", "telemetry"),
            *("sessions/{session_id}/finish", "create_sampling_session", "asample", "retrieve_future", "cancel_future"),
            *("create_model", "get_info", "forward", "forward_backward", "optim_step", "unload_model"),
            *("create_custom_loss", "save_weights", "save_weights_for_sampler", "save_weights_external"),
            *("load_weights", "copy_weights", "weights_info"),
        ),
    }.items()
    for path in paths
}
ABOUT_THE_API = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
"""Static; FastAPI's own."""
STRANGERS: dict[str, tuple[str, dict[str, str]]] = {
    "another machine": ("192.0.2.1", {}),
    "another site's page": ("127.0.0.1", {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}),
    "a page without an origin": ("127.0.0.1", {"Origin": "null"}),
    "an image in a page": ("127.0.0.1", {"Sec-Fetch-Site": "cross-site"}),
    "a name that was made to resolve here": ("127.0.0.1", {"Host": "evil.example:8000"}),
    "a proxy on this machine": ("127.0.0.1", {"X-Forwarded-For": "192.0.2.1"}),
    "a caller that says it is local": ("127.0.0.1", {"X-Forwarded-For": "127.0.0.1"}),
}


class Untouched:
    """A deployment that nothing may reach."""

    def __getattr__(self, method: str) -> Any:
        raise AssertionError(f"{method} was called")


def routes(services: Services) -> Iterator[tuple[str, APIRoute]]:
    """Each method and route of the application."""
    for route in create_app(services).routes:
        if not isinstance(route, APIRoute):
            assert getattr(route, "path", None) in ABOUT_THE_API
            continue
        yield from ((method, route) for method in route.methods)


def client(services: Services, host: str = "127.0.0.1", headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(services), client=(host, 1), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=headers)


def guarded(services: Services) -> list[tuple[str, str]]:
    """Method and path of each guarded route."""
    return [(method, route.path) for method, route in routes(services) if isinstance(route, GuardedRoute)]


def test_every_route_is_guarded_but_those_that_anyone_may_call(services):
    assert all(isinstance(route, OpenRoute) for _, route in routes(services))
    found = {(method, route.path) for method, route in routes(services) if not isinstance(route, GuardedRoute)}
    assert found == OPEN
    assert len(guarded(services)) >= 12


@pytest.mark.parametrize("token", [None, "secret"])
async def test_programs_in_a_trusted_network_pass_without_a_token(services, token):
    class Ingest:
        async def is_paused(self) -> bool:
            return True

    tls_context = replace(services, ingest=Ingest(), authorizer=Authorizer(token, [ip_network("192.0.2.0/24")]))
    async with client(tls_context, "192.0.2.1", {"Host": "rollouts:8000"}) as http:
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        assert (await http.get("/is_paused", headers={"X-Forwarded-For": "192.0.2.2"})).status_code == 403


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("body", [None, b"{}", b"{"], ids=["no body", "a body", "no JSON"])
async def test_without_a_token_no_guarded_route_answers_a_stranger(services, stranger, body):
    host, headers = STRANGERS[stranger]
    nothing = replace(services, ingest=Untouched(), monitor=Untouched())
    async with client(nothing, host, headers) as http:
        for method, path in guarded(nothing):
            reply = await http.request(method, path, content=body, headers={"Content-Type": "application/json"})
            assert reply.status_code == 403, (method, path, reply.text)


async def test_a_missing_token_is_refused_before_the_body_is_read(services):
    nothing = replace(services, ingest=Untouched(), monitor=Untouched(), authorizer=Authorizer("secret"))

    async def body() -> Any:
        raise AssertionError("the body was read")
        yield b""

    async with client(nothing) as http:
        for method, path in guarded(nothing):
            reply = await http.request(method, path, content=body(), headers={"Content-Type": "application/json"})
            assert reply.status_code == 401, (method, path, reply.text)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
async def test_a_guarded_post_takes_json_only(services, content_type):
    nothing = replace(services, ingest=Untouched(), monitor=Untouched())
    headers = {} if content_type is None else {"Content-Type": content_type}
    async with client(nothing) as http:
        for method, path in guarded(nothing):
            if method == "POST":
                reply = await http.request(method, path, content=b"{}", headers=headers)
                assert reply.status_code in (400, 422), (path, reply.text)
                assert "Content-Type: application/json" in reply.text, (path, reply.text)


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
async def test_json_may_have_parameters_and_other_names(services, content_type):
    async with client(services) as http:
        reply = await http.post(
            "/inference/v1/generate", content=b'{"token_ids": [5]}', headers={"Content-Type": content_type}
        )
    assert reply.status_code == 200


async def refused(services: Services, path: str, body: object) -> dict[str, Any]:
    """The error of a body that is refused; it is short, whatever was sent."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client(services, "192.0.2.1") as http:
        reply = await http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert 400 <= reply.status_code < 500, reply.text
    assert len(reply.content) < 20_000
    error: dict[str, Any] = reply.json()["error"] | {"status": reply.status_code}
    return error


GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (GENERATE, {"token_ids": [{}] * 100_000}, "token_ids.0"),
        (GENERATE, {"token_ids": [5], "sampling_params": {"stop": [1] * 100_000}}, "sampling_params.stop"),
        (GENERATE, {"token_ids": [5], **{f"k{i}": 0 for i in range(100_000)}}, "100000 names"),
        (GENERATE, {"token_ids": [5], "sampling_params": {f"k{i}": 0 for i in range(100_000)}}, "100000 names"),
        (GENERATE, {"token_ids": [5], "k" * 1_000_000: 0}, "kkk"),
        (GENERATE, {"token_ids": [5], "model": "m" * 1_000_000}, "model"),
        (COMPLETIONS, {"prompt": [{}] * 100_000}, "prompt"),
        (COMPLETIONS, {"prompt": [[{}] * 1000] * 100}, "prompt"),
        (COMPLETIONS, {"prompt": [5], "stop": [""] * 100_000}, "stop"),
    ],
)
async def test_the_reply_to_a_body_full_of_problems_is_short(services, path, body, field):
    error = await refused(services, path, body)
    assert error["status"] == 422 and field in error["message"]
    assert len(error["detail"]["fields"]) <= PROBLEMS_LISTED


async def test_problems_beyond_those_told_are_counted(services):
    names = {f"k{i}": 0 for i in range(20)}
    error = await refused(services, GENERATE, {"token_ids": [5], "sampling_params": {"n": 0}, "priority": "x", **names})
    assert "20 names are no fields here" in error["message"]
    problems: list[FieldProblem] = [
        {"type": "missing", "loc": ("body", f"k{i}"), "msg": "is missing"} for i in range(200)
    ]
    told = validation_error("POST /v1/weights", problems)
    assert told.message.endswith("and 192 more") and told.detail["problems"] == 200
    assert len(told.detail["fields"]) == PROBLEMS_LISTED


async def test_many_unknown_names_are_one_problem_of_every_body(services):
    nothing = replace(services, ingest=Untouched(), monitor=Untouched())
    names, tried = {f"x{i}": 0 for i in range(1000)}, 0
    async with client(nothing) as http:
        for method, route in routes(nothing):
            body = None if route.body_field is None else route.body_field.field_info.annotation
            if any(isinstance(each, type) and issubclass(each, Frozen) for each in (body, *get_args(body))):
                reply = await http.request(method, route.path, json=names)
                assert "1000 names are no fields here" in reply.text, (route.path, reply.text)
                assert reply.json()["error"]["detail"]["problems"] == 1
                tried += 1
    assert tried >= 20


WORDS, NUMBERS = {f"x{i}": "y" for i in range(1000)}, [0] * 1000
LOGPROBS: dict[str, Any] = {"trainer_logprobs": [-1.0], "rollout_logprobs": [-1.0], "spans": []}
TENSOR = {"name": "w", "dtype": "int8", "shape": [1]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"token_ids": [5], "sampling_params": {"logit_bias": WORDS}}),
        (COMPLETIONS, {"prompt": [5], "logit_bias": WORDS}),
        (COMPLETIONS, {"prompt": [5], "stream": True, "stream_options": {f"x{i}": 0 for i in range(1000)}}),
        ("/v1/weights", {"version": 1, "tensors": NUMBERS}),
        ("/v1/weights", {"version": 1, "tensors": [TENSOR], "kv_scales": WORDS}),
        ("/init_weight_transfer_engine", {"init_info": WORDS}),
        ("/weight_checker", {"action": "compare", "baseline": dict.fromkeys(WORDS, 0)}),
        ("/weights_checker", {"action": "compare", "skip_tensor_list": NUMBERS}),
        ("/v1/mismatch", {"rollouts": NUMBERS}),
        ("/v1/mismatch", {"rollouts": [{"completions": NUMBERS}]}),
        *(
            ("/v1/mismatch", {"rollouts": [{"completions": [LOGPROBS | {field: ["x"] * 1000}]}]})
            for field in ("trainer_logprobs", "rollout_logprobs", "spans", "mask")
        ),
    ],
)
async def test_many_wrong_entries_have_the_problems_of_the_first(services, path, body):
    async with client(replace(services, ingest=Untouched())) as http:
        reply = await http.post(path, json=body)
    assert reply.status_code in (400, 422) and reply.json()["error"]["detail"]["problems"] <= 2, reply.text


async def test_a_step_of_1024_long_prompts_is_one_body(services, engine):
    """TRL's server mode sends a generation batch in one request."""
    body = json.dumps({"prompt": [[123456] * 2000] * 1024, "max_tokens": 1})
    assert len(body) > OpenRoute.body_bytes
    async with client(replace(services, vocab_size=151_936, max_model_len=4096)) as http:
        reply = await http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 200 and len(reply.json()["choices"]) == 1024


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, "/generate"])
@pytest.mark.parametrize("value", [b"[]", b"{}", b'""'])
async def test_a_large_body_of_small_values_is_refused(services, path, value):
    body = b'{"prompt": [' + b",".join([value] * (PromptsRoute.max_strings + 1)).ljust(OpenRoute.body_bytes) + b"]}"
    async with client(services) as http:
        reply = await http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 413 and "send what is in it in several" in reply.json()["error"]["message"]


async def test_a_body_of_empty_lists_is_not_parsed(services):
    async with client(services) as http:
        body = b'{"messages": [' + b"[]," * (OpenRoute.max_lists + 1) + b"[]]"  # and not even JSON
        reply = await http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 413 and "lists and objects" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("path", "limit"), [(GENERATE, PromptsRoute), (COMPLETIONS, PromptsRoute), (CHAT, OpenRoute)])
async def test_a_body_too_long_is_refused_before_all_of_it_arrives(services, path, limit):
    sent = 0

    async def body() -> Any:
        nonlocal sent
        while True:
            sent += 1
            yield b" " * (1 << 20)

    async with client(services) as http:
        reply = await http.post(path, content=body(), headers={"Content-Type": "application/json"})
    assert reply.status_code == 413 and reply.json()["error"]["type"] == "PayloadTooLarge"
    assert sent == limit.body_bytes // (1 << 20) + 1


async def test_too_many_completions_are_refused_before_any_begins(services, engine):
    error = await refused(services, COMPLETIONS, {"prompt": [[5]] * 100_000, "max_tokens": 1})
    assert error["status"] == 422 and "100000 prompts with n=1" in error["message"]
    error = await refused(services, COMPLETIONS, {"prompt": [[5]] * 3, "n": 2048, "max_tokens": 1})
    assert "3 prompts with n=2048 are 6144 completions, and one request may have 4096" in error["message"]
    assert engine.calls == []


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (GENERATE, rb'{"prompt": "a\ud800"}', "prompt"),
        (GENERATE, rb'{"token_ids": [5], "sampling_params": {"stop": ["x", "\uDFFF"]}}', "sampling_params.stop.1"),
        (GENERATE, rb'{"token_ids": [5], "request_id": "\ud800"}', "request_id"),
        (GENERATE, rb'{"token_ids": [5], "session_id": "\udc00\ud800"}', "session_id"),
        (GENERATE, rb'{"token_ids": [5], "\ud800": 1}', r"\ud800"),
        (COMPLETIONS, rb'{"prompt": ["a", "\ud800"]}', "prompt.1"),
        (COMPLETIONS, rb'{"prompt": "a", "stop": "\ud800"}', "stop"),
        (COMPLETIONS, rb'{"prompt": "a", "user": "\ud800"}', "user"),
    ],
)
async def test_half_a_surrogate_pair_is_refused_by_field(services, path, body, field):
    error = await refused(services, path, body)
    assert error["status"] == 422
    assert [problem["field"] for problem in error["detail"]["fields"]] in ([field], [f"'{field}'"])


async def test_a_whole_surrogate_pair_is_a_character(services):
    async with client(services) as http:
        reply = await http.post(
            GENERATE,
            content=rb'{"token_ids": [5], "request_id": "\ud83d\ude00"}',
            headers={"Content-Type": "application/json"},
        )
    assert reply.status_code == 200 and reply.json()["request_id"] == "😀"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt": "\xff"}', "the body is not UTF-8, at byte 12"),
        (b'{"prompt": "\xed\xa0\x80"}', "the body is not UTF-8, at byte 12"),
        (b"[" * 200_000, "the body is nested too deeply"),
        (b'{"token_ids": [' + b"9" * 5000 + b"]}", "the body has a number that is too long"),
        (b'{"token_ids": [5', "the body is not JSON"),
    ],
)
async def test_a_body_that_is_no_json_text_is_malformed(services, body, says):
    error = await refused(services, GENERATE, body)
    assert error["status"] == 400 and error["type"] == "MalformedRequest" and says in error["message"]


async def test_a_body_that_is_cut_off_is_malformed(services):
    start, *_ = await call_and_leave(services, "POST", GENERATE, b'{"tok', at=None)
    assert start["status"] == 400
