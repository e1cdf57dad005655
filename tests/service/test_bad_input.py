"""Bad input at every route gets a 4xx that names the trouble, and the service goes on serving."""

import pytest

from rollout_service.client import RolloutClient

GENERATE, COMPLETIONS, WEIGHTS = "/inference/v1/generate", "/v1/completions", "/v1/weights"


BAD_REQUESTS = {
    "a prompt longer than the context": (GENERATE, {"token_ids": [5] * 2100}, 400, "maximum context length of 2048"),
    "an unknown field": (GENERATE, {"token_ids": [5], "foo": 1}, 422, "foo is not a field"),
    "a grammar that is none": (
        GENERATE,
        {"token_ids": [5], "sampling_params": {"structured_outputs": {"regex": "("}}},
        422,
        "regex",
    ),
    "another model": (GENERATE, {"token_ids": [5], "model": "gpt-4"}, 404, "'gpt-4' is not served"),
    "one bad prompt among good ones": (COMPLETIONS, {"prompt": [[5], [4096]]}, 422, "prompt 1 of 2"),
    "a version of nothing": (WEIGHTS, {"version": 900}, 422, "tensors"),
    "a path outside the allowed root": (WEIGHTS, {"version": 900, "source": {"path": "/etc"}}, 403, "source_roots"),
    "a commit of nothing": (f"{WEIGHTS}/900/commit", {}, 404, "900 is not staged"),
    "a pause with an unknown mode": ("/pause?mode=now", None, 422, "mode"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
async def test_bad_input_is_refused_by_name(case, http):
    path, body, status, named = BAD_REQUESTS[case]
    reply = await http.post(path, json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert named in error["message"] and error["type"] and isinstance(error["detail"], dict)


async def test_data_routes_need_no_token_and_serve_after_bad_input(service):
    async with RolloutClient(service.url) as anyone:
        assert await anyone.health()
        assert len((await anyone.generate([5, 6], max_tokens=2, ignore_eos=True)).completions[0].token_ids) == 2
