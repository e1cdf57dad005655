"""The bodies that released clients of trainers send to the data routes, and what they read of the replies.

Bodies and readings are of the clients' sources, in the versions named.
"""

import base64
import struct
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rollout_service.protocol.rollout import Candidate
from tests.unit.gateway.fakes import http_to

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
PLAIN = {"temperature": 1.0, "top_p": 1.0}


async def answered(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert int(reply.headers["content-length"]) == len(reply.content)  # SkyRL parses no body without it
    return dict(reply.json())


VERIFIERS: dict[str, Any] = {
    "model": "tiny", "token_ids": [36, 37], "cache_salt": "7",
    "sampling_params": {**PLAIN, "max_tokens": 8, "logprobs": 1, "stop_token_ids": [3], "skip_special_tokens": False,
                        "routed_experts_prompt_start": 0},
}  # fmt: skip
IDS: dict[str, Any] = {**PLAIN, "prompt": [36, 37], "max_tokens": 8}
TRL = {**IDS, "model": "tiny", "top_k": 0, "repetition_penalty": 1.0, "logprobs": 0, "return_token_ids": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "verifiers 0.4.0 with renderers 0.1.12, which prime-rl trains with": (GENERATE, VERIFIERS),
    "skyrl 0.4.0": (GENERATE, {
        "model": "tiny", "token_ids": [36, 37], "features": None, "cache_salt": None,
        "sampling_params": {**PLAIN, "min_tokens": 1, "max_tokens": 8, "top_k": -1, "min_p": 0.0, "logprobs": 1,
                            "stop": None, "skip_special_tokens": True, "include_stop_str_in_output": True,
                            "output_kind": 2},
    }),
    "the Tinker server of skyrl 0.4.0": (COMPLETIONS, {
        **IDS, "model": "tiny", "n": 2, "seed": None, "logprobs": True, "return_token_ids": True,
    }),
    "trl 1.16.0, sync": (COMPLETIONS, {
        **TRL, "prompt": [[36, 37]] * 2, "n": 2, "min_p": 0.0, "return_tokens_as_token_ids": True,
    }),
    "trl 1.16.0, async": (COMPLETIONS, {**TRL, "n": 1, "seed": 2**63 - 2**13, "min_p": None}),
    "areal 1.0.4, its vLLM backend": (COMPLETIONS, {
        **IDS, "top_k": 100_000_000, "stop_token_ids": [3], "ignore_eos": False, "skip_special_tokens": False,
        "frequency_penalty": 0.0, "return_tokens_as_token_ids": True, "logprobs": 0, "use_beam_search": False,
        "stream": False,
    }),
    "rllm-model-gateway 0.1.0": (COMPLETIONS, {
        "model": "tiny", "prompt": ">?", "logprobs": True, "return_token_ids": True, "max_completion_tokens": 8,
        "extra_body": {"return_token_ids": True},
    }),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
async def test_a_clients_request_is_answered(http, engine, path, body):
    reply = await answered(http, path, body)
    assert {call.cache_salt for call in engine.calls} == {body.get("cache_salt")}
    assert reply["choices"]
    for choice in reply["choices"]:
        logprobs = choice["logprobs"]
        rows = logprobs["content"] if path == GENERATE else ()
        of_tokens = [row["logprob"] for row in rows] or logprobs["token_logprobs"]
        assert of_tokens == [-0.5, -1.0]
        if body.get("return_tokens_as_token_ids"):
            assert logprobs["tokens"] == ["token_id:37", "token_id:36"]
        else:
            assert choice["token_ids"] == [37, 36]


async def test_verifiers_next_client_has_packed_logprobs(services, engine):
    """renderers 0.1.13.dev17: two candidates more than the top 20, and all logprobs as packed numbers."""
    engine.top_logprobs = ((Candidate(5, -0.25, 1), Candidate(37, -0.5, 2)), (Candidate(36, -1.0, 1),))
    sampling = {**VERIFIERS["sampling_params"], "logprobs": 22, "extra_args": {"prl_compact_logprobs": True}}
    async with http_to(replace(services, max_logprobs=40)) as http:
        reply = await http.post(GENERATE, json={**VERIFIERS, "sampling_params": sampling})
        assert b'"compact_logprobs":{"data":"' in reply.content  # the client cuts it out of the bytes
        choice = reply.json()["choices"][0]
        packed = choice["compact_logprobs"]
        assert (packed["format"], packed["offsets"], packed["num_top_logprobs"]) == ("u32-f32-le-v1", [0, 2, 3], 22)
        numbers = struct.unpack("<3I3f", base64.b64decode(packed["data"], validate=True))
        assert numbers == (37, 5, 36, -0.5, -0.25, -1.0) and choice["logprobs"] is None
        assert choice["token_ids"] == [37, 36] and engine.calls[0].sampling.logprobs == 22
        reply = await http.post(GENERATE, json={**VERIFIERS, "sampling_params": sampling, "stream": True})
        assert reply.status_code == 422 and "prl_compact_logprobs" in reply.text


@pytest.mark.parametrize("times", [{"prompt": [[36, 37]] * 3}, {"prompt": [[36] * 6]}, {"n": 3}])
async def test_prompt_logprobs_of_trls_distillation_are_bounded(http, engine, monkeypatch, times):
    """trl 1.16.0."""
    monkeypatch.setattr("rollout_service.gateway.prompts.MAX_PROMPT_LOGPROBS", 10)
    engine.prompt_logprobs = (None, (Candidate(37, -2.0, 3), Candidate(5, -0.25, 1)))
    body = {"model": "tiny", "prompt": [[36, 37]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1}
    reply = await answered(http, COMPLETIONS, body)
    of_second = {"37": {"logprob": -2.0, "rank": 3}, "5": {"logprob": -0.25, "rank": 1}}
    assert reply["choices"][0]["prompt_logprobs"] == [None, of_second]
    refused = await http.post(COMPLETIONS, json={**body, **times})
    assert refused.status_code == 422 and "12 logprobs are more than the 10" in refused.text
    assert [call.sampling.prompt_logprobs for call in engine.calls] == [1]


async def test_what_an_extra_body_alone_says_is_refused(http):
    for extra in ({"top_k": 5}, {"model": "other"}, "top_k"):
        reply = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": "ab", "extra_body": extra})
        assert reply.status_code == 422 and "extra_body" in reply.json()["error"]["message"], reply.text


class TestCandidates:
    async def test_both_routes_name_the_likeliest_tokens(self, http, engine):
        engine.top_logprobs = ((Candidate(5, -0.25, 1), Candidate(37, -0.5, 2)), (Candidate(36, -1.0, 1),))
        body = {"token_ids": [36, 37], "sampling_params": {"logprobs": 2}}
        reply = await answered(http, GENERATE, body)
        first, second = reply["choices"][0]["logprobs"]["content"]
        assert [(c["token_id"], c["token"], c["rank"]) for c in first["top_logprobs"]] == [
            (37, "token_id:37", 2),
            (5, "token_id:5", 1),
        ]
        assert [c["token_id"] for c in second["top_logprobs"]] == [36]
        flat = (await answered(http, GENERATE, {**body, "flat_logprobs": True}))["choices"][0]
        assert flat["top_logprobs"] == [[[5, -0.25, 1], [37, -0.5, 2]], [[36, -1.0, 1]]]
        body = {"prompt": [36, 37], "logprobs": 2, "return_tokens_as_token_ids": True}
        choice = (await answered(http, COMPLETIONS, body))["choices"][0]
        assert choice["logprobs"]["top_logprobs"] == [{"token_id:37": -0.5, "token_id:5": -0.25}, {"token_id:36": -1.0}]


async def test_a_prompt_that_does_not_fit_is_a_400_in_openais_words(http):
    for path, prompt in ((GENERATE, "token_ids"), (COMPLETIONS, "prompt")):
        reply = await http.post(path, json={prompt: [36] * 64})
        assert reply.status_code == 400 and "maximum context length" in reply.json()["error"]["message"]
