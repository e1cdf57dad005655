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
from rollout_service.protocol.sampling import Sampling
from tests.unit.gateway.fakes import EchoEngine, http_to

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
PLAIN = {"temperature": 1.0, "top_p": 1.0}


async def answered(http: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    reply = await http.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert int(reply.headers["content-length"]) == len(reply.content)  # SkyRL parses no body without it
    return dict(reply.json())


def sampled(engine: EchoEngine) -> Sampling:
    [call] = engine.calls
    return call.sampling


class TestVerifiers:
    """verifiers 0.4.0 and renderers 0.1.12, which prime-rl trains with."""

    BODY = {  # noqa: RUF012
        "model": "tiny",
        "token_ids": [36, 37],
        "sampling_params": {
            **PLAIN,
            "max_tokens": 8,
            "logprobs": 1,
            "stop_token_ids": [3],
            "skip_special_tokens": False,
            "routed_experts_prompt_start": 0,
        },
        "cache_salt": "7",
    }

    async def test_its_request_is_answered(self, http, engine):
        reply = await answered(
            http, GENERATE, self.BODY, **{"X-Session-ID": "trace-1", "Authorization": "Bearer EMPTY"}
        )
        assert engine.calls[0].session_id == "trace-1" and engine.calls[0].cache_salt == "7"
        choice = reply["choices"][0]
        assert [each["token"] for each in choice["logprobs"]["content"]] == ["token_id:37", "token_id:36"]
        assert choice["token_ids"] == [37, 36] and reply["request_id"] and reply["usage"]["completion_tokens"] == 2

    async def test_its_next_clients_request_is_answered(self, services, engine):
        """renderers 0.1.13.dev17: two candidates more than the top 20, and all logprobs as packed numbers."""
        engine.top_logprobs = ((Candidate(5, -0.25, 1), Candidate(37, -0.5, 2)), (Candidate(36, -1.0, 1),))
        sampling = {**self.BODY["sampling_params"], "logprobs": 22, "extra_args": {"prl_compact_logprobs": True}}
        async with http_to(replace(services, max_logprobs=40)) as http:
            reply = await http.post(GENERATE, json={**self.BODY, "sampling_params": sampling})
            assert b'"compact_logprobs":{"data":"' in reply.content  # the client cuts it out of the bytes
            choice = reply.json()["choices"][0]
            packed = choice["compact_logprobs"]
            assert (packed["format"], packed["offsets"], packed["num_top_logprobs"]) == ("u32-f32-le-v1", [0, 2, 3], 22)
            numbers = struct.unpack("<3I3f", base64.b64decode(packed["data"], validate=True))
            assert numbers == (37, 5, 36, -0.5, -0.25, -1.0) and choice["logprobs"] is None
            assert choice["token_ids"] == [37, 36] and sampled(engine).logprobs == 22
            reply = await http.post(GENERATE, json={**self.BODY, "sampling_params": sampling, "stream": True})
            assert reply.status_code == 422 and "prl_compact_logprobs" in reply.text


class TestSkyRL:
    """skyrl 0.4.0: its own client, and the one of its Tinker server."""

    async def test_a_request_with_nulls_is_answered(self, http, engine):
        sampling = {
            **PLAIN,
            "min_tokens": 1,
            "skip_special_tokens": True,
            "include_stop_str_in_output": True,
            "max_tokens": 8,
            "top_k": -1,
            "min_p": 0.0,
            "logprobs": 1,
            "stop": None,
            "output_kind": 2,
        }
        body = {
            "sampling_params": sampling,
            "model": "tiny",
            "token_ids": [36, 37],
            "features": None,
            "cache_salt": None,
        }
        reply = await answered(http, GENERATE, body)
        assert [each["logprob"] for each in reply["choices"][0]["logprobs"]["content"]] == [-0.5, -1.0]
        assert sampled(engine).include_stop_str_in_output and sampled(engine).stop == ()

    async def test_its_tinker_servers_request_is_answered(self, http):
        body = {**PLAIN, "model": "tiny", "prompt": [36, 37], "n": 2, "max_tokens": 8, "seed": None, "logprobs": True}
        reply = await answered(http, COMPLETIONS, {**body, "return_token_ids": True})
        for choice in reply["choices"]:
            assert choice["token_ids"] == [37, 36] and choice["logprobs"]["token_logprobs"] == [-0.5, -1.0]


class TestTRL:
    """trl 1.16.0."""

    async def test_the_sync_trainers_request_is_answered(self, http):
        body = {
            **PLAIN,
            "model": "tiny",
            "prompt": [[36, 37], [38]],
            "n": 2,
            "repetition_penalty": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": 8,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        reply = await answered(http, COMPLETIONS, body)
        assert len(reply["choices"]) == 4
        for choice in reply["choices"]:
            logprobs = choice["logprobs"]
            tokens = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
            for token, logprob, top in tokens:
                assert top[token] == logprob
            assert choice["prompt_token_ids"]

    async def test_the_async_trainers_request_is_answered(self, http, engine):
        body = {**PLAIN, "model": "tiny", "prompt": [36, 37], "max_tokens": 8, "top_k": 0, "repetition_penalty": 1.0}
        seed = 2**63 - 2**13
        reply = await answered(
            http, COMPLETIONS, {**body, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": seed, "min_p": None}
        )
        assert reply["choices"][0]["token_ids"] == [37, 36] and sampled(engine).seed == seed

    async def test_distillation_asks_for_the_prompts_logprobs(self, http, engine):
        engine.prompt_logprobs = (None, (Candidate(37, -2.0, 3), Candidate(5, -0.25, 1)))
        body = {"model": "tiny", "prompt": [[36, 37]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1}
        reply = await answered(http, COMPLETIONS, body)
        assert reply["choices"][0]["prompt_logprobs"] == [
            None,
            {"37": {"logprob": -2.0, "rank": 3}, "5": {"logprob": -0.25, "rank": 1}},
        ]
        assert sampled(engine).prompt_logprobs == 1

    @pytest.mark.parametrize("times", [{"prompt": [[36, 37]] * 3}, {"prompt": [[36] * 6]}, {"n": 3}])
    async def test_more_prompt_logprobs_than_fit_a_reply_are_refused(self, http, engine, monkeypatch, times):
        monkeypatch.setattr("rollout_service.gateway.prompts.MAX_PROMPT_LOGPROBS", 10)
        body = {"model": "tiny", "prompt": [[36, 37]], "prompt_logprobs": 1}
        await answered(http, COMPLETIONS, body)
        refused = await http.post(COMPLETIONS, json={**body, **times})
        assert refused.status_code == 422 and "12 logprobs are more than the 10" in refused.text
        assert len(engine.calls) == 1


class TestAReaL:
    """areal 1.0.4, its vLLM backend."""

    async def test_its_request_names_no_model(self, http, engine):
        body = {
            **PLAIN,
            "prompt": [36, 37],
            "top_k": 100_000_000,
            "max_tokens": 8,
            "stop_token_ids": [3],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "frequency_penalty": 0.0,
            "return_tokens_as_token_ids": True,
            "logprobs": 0,
            "use_beam_search": False,
            "stream": False,
        }
        reply = await answered(http, COMPLETIONS, body)
        assert reply["choices"][0]["logprobs"]["tokens"] == ["token_id:37", "token_id:36"]
        assert not sampled(engine).skip_special_tokens

    async def test_its_teacher_scores_a_prompt(self, http, engine):
        """``VLLMBackend.build_score_request``, which reads the end of ``prompt_logprobs``."""
        engine.prompt_logprobs = (None, (Candidate(37, -2.0, 3), Candidate(5, -0.25, 1)))
        body = {"prompt": [36, 37], "max_tokens": 1, "temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1}
        [choice] = (await answered(http, COMPLETIONS, {**body, "echo": True}))["choices"]
        assert next(iter(choice["prompt_logprobs"][-1].values()))["logprob"] == -2.0


class TestRLLM:
    """rllm-model-gateway 0.1.0, for completions."""

    async def test_its_request_is_answered(self, http, engine):
        body = {"model": "tiny", "prompt": "ab", "logprobs": True, "return_token_ids": True, "max_completion_tokens": 9}
        reply = await answered(http, COMPLETIONS, {**body, "extra_body": {"return_token_ids": True}})
        assert sampled(engine).max_tokens == 9
        assert reply["choices"][0]["token_ids"] and reply["choices"][0]["logprobs"]["token_logprobs"]

    async def test_an_echoed_prompt_has_its_logprobs(self, services, http, engine):
        """rLLM 9beb6e0's ``OpenAIEngine.compute_logprobs`` reads as many as the prompt has tokens."""
        a, b, c = services.tokenizer.encode("abc")
        engine.prompt_logprobs = (None, (Candidate(b, -2.0, 3), Candidate(c, -0.25, 1)))
        engine.top_logprobs = ((Candidate(b, -0.5, 1),), (Candidate(a, -1.0, 1),))
        body = {"model": "tiny", "prompt": [a, b], "max_tokens": 1, "echo": True, "logprobs": 1, **PLAIN}
        reply = await answered(http, COMPLETIONS, body)
        [choice] = reply["choices"]
        assert (choice["text"], reply["usage"]["prompt_tokens"]) == ("abba", 2)
        assert choice["logprobs"] == {
            "tokens": ["a", "b", "b", "a"],
            "token_logprobs": [None, -2.0, -0.5, -1.0],
            "text_offset": [0, 1, 2, 3],
            "top_logprobs": [None, {"b": -2.0, "c": -0.25}, {"b": -0.5}, {"a": -1.0}],
        }
        assert sampled(engine).prompt_logprobs == 1 and "prompt_logprobs" not in choice
        plain = await answered(http, COMPLETIONS, {"prompt": "ab", "echo": True, "n": 2})
        assert [(each["text"], each["logprobs"]) for each in plain["choices"]] == [("abba", None)] * 2
        streamed = await http.post(COMPLETIONS, json={**body, "stream": True})
        assert streamed.status_code == 422 and "echo has no place in a stream" in streamed.text

    async def test_what_an_extra_body_alone_says_is_refused(self, http):
        for extra in ({"top_k": 5}, {"model": "other"}, "top_k"):
            reply = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": "ab", "extra_body": extra})
            assert reply.status_code == 422 and "extra_body" in reply.json()["error"]["message"], reply.text

    async def test_a_later_turn_brings_the_chats_other_fields(self, http, engine):
        """rLLM 9beb6e0's gateway in its cumulative mode: ``rllm_model_gateway/proxy.py``, ``middleware.py``."""
        engine.top_logprobs = ((Candidate(5, -0.25, 1),), (Candidate(36, -1.0, 1),))
        of_the_chat = {
            "parallel_tool_calls": False, "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False},
            "metadata": {"run": "a"}, "store": False, "service_tier": "auto", "prompt_cache_key": "a",
            "top_logprobs": 1, "response_format": {"type": "text"}, "max_completion_tokens": 8,
        }  # fmt: skip
        body = {"model": "tiny", "prompt": [36, 37], "add_special_tokens": False, "logprobs": True}
        reply = await answered(http, COMPLETIONS, {**body, **of_the_chat, "return_token_ids": True})
        [choice] = reply["choices"]
        assert choice["token_ids"] == [37, 36] and choice["prompt_token_ids"] == [36, 37]
        assert len(choice["logprobs"]["top_logprobs"][0]) == 2 and sampled(engine).logprobs == 1


class TestNeMoGym:
    """NeMo-Gym 07d6b0d with ``use_completions_api``: ``responses_api_models/vllm_model/app.py``."""

    BODY = {  # noqa: RUF012
        "model": "tiny", "prompt": "ab", "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "n": 1, "seed": 3,
        "stop": ["z"], "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {}, "user": "u", "logprobs": 0,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip

    @pytest.mark.parametrize(
        ("given", "constraint"),
        [
            (None, None),
            ({"type": "text"}, None),
            ({"type": "json_object"}, {"json_object": True}),
            (
                {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string"}}},
                {"json": {"type": "string"}},
            ),
        ],
    )
    async def test_a_response_format_is_a_constraint(self, http, engine, given, constraint):
        reply = await answered(http, COMPLETIONS, {**self.BODY, "response_format": given})
        [choice] = reply["choices"]
        assert choice["prompt_token_ids"] and choice["logprobs"]["tokens"] == [
            f"token_id:{t}" for t in choice["token_ids"]
        ]
        found = sampled(engine).structured_outputs
        assert (None if found is None else found.model_dump(exclude_none=True)) == constraint

    async def test_an_unknown_format_is_refused(self, http, engine):
        for wrong in ({"type": "grammar"}, {"type": "json_schema"}, "json"):
            reply = await http.post(COMPLETIONS, json={**self.BODY, "response_format": wrong})
            assert reply.status_code == 422 and "response_format is neither" in reply.json()["error"]["message"]
        both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
        assert (await http.post(COMPLETIONS, json={**self.BODY, **both})).status_code == 422
        assert engine.calls == []


class TestAgentLightning:
    """Agent-Lightning c632d8d: ``agentlightning/server/proxy.py`` and ``routes/events.py``, which reads the reply."""

    async def test_its_completions_are_read(self, http):
        body = {"model": "tiny", "prompt": "ab", "temperature": 0.7, "logprobs": True, "return_token_ids": True}
        [choice] = (await answered(http, COMPLETIONS, body))["choices"]
        assert choice["prompt_token_ids"] and len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) == 2


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
