"""Bad input at every route gets a 4xx that names the trouble, and the service goes on serving."""

import httpx
import pytest

from rollout_service.client import RolloutClient
from rollout_service.local import LocalService

GENERATE, COMPLETIONS, WEIGHTS = "/inference/v1/generate", "/v1/completions", "/v1/weights"

BAD_REQUESTS = {
    "an id outside the vocabulary": (GENERATE, {"token_ids": [5, 4096]}, 422, "token id 4096 at position 1"),
    "a negative id": (GENERATE, {"token_ids": [-1]}, 422, "token id -1"),
    "an empty prompt": (GENERATE, {"token_ids": []}, 422, "prompt is empty"),
    "no prompt": (GENERATE, {"sampling_params": {}}, 422, "token_ids or prompt"),
    "ids and text": (GENERATE, {"token_ids": [5], "prompt": "5"}, 422, "token_ids or prompt"),
    "a prompt longer than the context": (GENERATE, {"token_ids": [5] * 2100}, 400, "maximum context length of 2048"),
    "no room for a token": (GENERATE, {"token_ids": [5] * 2048}, 400, "maximum context length of 2048"),
    "n=0": (GENERATE, {"token_ids": [5], "sampling_params": {"n": 0}}, 422, "sampling_params.n"),
    "many greedy": (GENERATE, {"token_ids": [5], "sampling_params": {"n": 2, "temperature": 0}}, 422, "n=2 greedy"),
    "a negative temperature": (
        GENERATE,
        {"token_ids": [5], "sampling_params": {"temperature": -1}},
        422,
        "temperature",
    ),
    "top_p above 1": (GENERATE, {"token_ids": [5], "sampling_params": {"top_p": 1.5}}, 422, "top_p"),
    "a string for a number": (GENERATE, {"token_ids": ["x"]}, 422, "token_ids.0"),
    "an unknown field": (GENERATE, {"token_ids": [5], "foo": 1}, 422, "foo is not a field"),
    "an unknown sampling field": (GENERATE, {"token_ids": [5], "sampling_params": {"beams": 2}}, 422, "beams"),
    "a stream with the prompt's logprobs": (
        GENERATE,
        {"token_ids": [5], "stream": True, "sampling_params": {"prompt_logprobs": 0}},
        422,
        "prompt_logprobs",
    ),
    "a stream with experts": (
        GENERATE,
        {"token_ids": [5], "stream": True, "return_routed_experts": True},
        422,
        "stream",
    ),
    "top logprobs": (GENERATE, {"token_ids": [5], "sampling_params": {"logprobs": 21}}, 422, "logprobs"),
    "a grammar that is none": (
        GENERATE,
        {"token_ids": [5], "sampling_params": {"structured_outputs": {"regex": "("}}},
        422,
        "regex",
    ),
    "another model": (GENERATE, {"token_ids": [5], "model": "gpt-4"}, 404, "'gpt-4' is not served"),
    "a list for an object": (GENERATE, [1, 2], 422, "the body"),
    "completions without a prompt": (COMPLETIONS, {"max_tokens": 4}, 422, "prompt"),
    "completions of an empty prompt": (COMPLETIONS, {"prompt": ""}, 422, "prompt is empty"),
    "completions of no prompts": (COMPLETIONS, {"prompt": []}, 422, "prompt is empty"),
    "completions with echo": (COMPLETIONS, {"prompt": "1", "echo": True}, 422, "echo"),
    "completions with an unknown field": (COMPLETIONS, {"prompt": "1", "suffix": "2"}, 422, "suffix"),
    "one bad prompt among good ones": (COMPLETIONS, {"prompt": [[5], [4096]]}, 422, "prompt 1 of 2"),
    "a version of nothing": (WEIGHTS, {"version": 900}, 422, "tensors"),
    "a version that is negative": (WEIGHTS, {"version": -1, "source": {"path": "x"}}, 422, "version"),
    "a version that is no number": (WEIGHTS, {"version": "new", "source": {"path": "x"}}, 422, "version"),
    "a path outside the allowed root": (WEIGHTS, {"version": 900, "source": {"path": "/etc"}}, 403, "source_roots"),
    "a commit of nothing": (f"{WEIGHTS}/900/commit", {}, 404, "900 is not staged"),
    "a commit with an unknown mode": (f"{WEIGHTS}/900/commit", {"mode": "now"}, 422, "mode"),
    "a pause with an unknown mode": ("/pause?mode=now", None, 422, "mode"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
async def test_bad_input_is_refused_by_name(case: str, http: httpx.AsyncClient) -> None:
    path, body, status, named = BAD_REQUESTS[case]
    reply = await http.post(path, json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert named in error["message"] and error["type"] and isinstance(error["detail"], dict)


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, WEIGHTS, f"{WEIGHTS}/900/commit"])
async def test_malformed_json_is_400_and_says_where(path: str, http: httpx.AsyncClient) -> None:
    reply = await http.post(path, content=b'{"token_ids": [1,', headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert "not JSON" in reply.json()["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
async def test_a_temperature_that_is_no_number_is_refused(number: str, http: httpx.AsyncClient) -> None:
    body = f'{{"token_ids": [5], "sampling_params": {{"temperature": {number}}}}}'
    reply = await http.post(GENERATE, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422
    assert "sampling_params.temperature" in reply.json()["error"]["message"]


async def test_an_unknown_route_is_404_in_the_same_form(http: httpx.AsyncClient) -> None:
    reply = await http.get("/v2/nothing")
    assert reply.status_code == 404 and reply.json()["error"]["type"] == "NotFound"


async def test_a_wrong_method_is_405_in_the_same_form(http: httpx.AsyncClient) -> None:
    reply = await http.get(GENERATE)
    assert reply.status_code == 405 and "GET" in reply.json()["error"]["message"]


ROUTES_WITH_A_TOKEN = [
    ("POST", WEIGHTS),
    ("GET", WEIGHTS),
    ("GET", f"{WEIGHTS}/0"),
    ("PUT", f"{WEIGHTS}/1/parts/0"),
    ("POST", f"{WEIGHTS}/1/commit"),
    ("DELETE", f"{WEIGHTS}/1"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("GET", "/v1/fleet"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES_WITH_A_TOKEN)
@pytest.mark.parametrize("token", [None, "wrong"])
async def test_weight_and_control_routes_need_the_token(
    service: LocalService, method: str, path: str, token: str | None
) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(base_url=service.url, headers=headers) as stranger:
        reply = await stranger.request(method, path)
    assert reply.status_code == 401
    assert "bearer token" in reply.json()["error"]["message"]


async def test_data_routes_need_no_token_and_serve_after_bad_input(service: LocalService) -> None:
    async with RolloutClient(service.url) as anyone:
        assert await anyone.health()
        assert len((await anyone.generate([5, 6], max_tokens=2, ignore_eos=True)).completions[0].token_ids) == 2
