"""The request and the reply of ``/inference/v1/generate``, and the sampling parameters of every surface."""

import math
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.sampling_params import SamplingParams

from rollout_service.errors import LONGEST_REASON, InvalidRequest
from rollout_service.gateway.generate import generate, spans
from rollout_service.protocol.generate import GenerateRequest
from rollout_service.protocol.rollout import Completion, Span
from rollout_service.protocol.sampling import LARGEST_SEED, Sampling

SPLIT = Completion(
    index=0,
    token_ids=(9, 8, 7),
    logprobs=(-0.1, -0.2, -0.3),
    finish_reason="stop",
    spans=(Span(version=3, start=0, end=1), Span(version=5, start=1, end=3)),
)

REFUSED_SAMPLING: dict[str, Any] = {
    "n": [0, -1, 4097, 1.5],
    "max_tokens": [0, -1],
    "min_tokens": [-1],
    "temperature": [-0.1, 2.1, 1e-300, math.nan, math.inf],
    "top_p": [0, 1.1, math.nan],
    "top_k": [-2, 2**64],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, 1e-300, 1e300, math.inf],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "seed": [LARGEST_SEED + 1, 2**63, -(2**63) - 1],
    "logprobs": [-1],
    "prompt_logprobs": [-1],
    "extra_args": [{"prl_compact_logprob": True}, 5],
    "logit_bias": [{"5": 101}, {"x": 1}, {5: math.inf}, dict.fromkeys(range(301), 1.0)],
    "structured_outputs": [{}, {"json": {}, "regex": "x"}, {"regex": "x" * 70_000}, {"json": {"x": "x" * 70_000}}],
    "output_kind": [0, 1],
    "stop": [[1], [""], ["\ud800"], ["x"] * 65],
    "stop_token_ids": [["x"], range(65)],
    "beams": [1],
    "best_of": [2],
    "allowed_token_ids": [[1]],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in REFUSED_SAMPLING.items() for v in values])
def test_sampling_out_of_range_or_unsupported_is_refused_by_name(name, value):
    with pytest.raises(ValidationError, match=name):
        Sampling.model_validate({name: value})


def test_one_stop_string_is_a_list_of_one_as_in_vllm():
    assert Sampling.model_validate({"stop": "ab"}).stop == tuple(SamplingParams(stop="ab").stop)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stream": "often"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs have no place in a stream"),
        ({"output_mode": "logits"}, "output_mode"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"min_weight_version": -1}, "min_weight_version"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"token_ids": ["x"]}, "token_ids"),
        ({"token_ids": [[1]]}, "token_ids"),
        ({"token_ids": None}, "give either token_ids or prompt"),
        ({"prompt": "1"}, "give either token_ids or prompt"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(fields, named):
    with pytest.raises(ValidationError, match=named):
        GenerateRequest.model_validate({"token_ids": [1], **fields})


def test_spans_have_versions_as_text_and_what_they_know():
    known = {"label": "run/step-5", "kv_from": 4, "replica_id": "b"}
    sent = spans(SPLIT.model_copy(update={"spans": (SPLIT.spans[0], SPLIT.spans[1].model_copy(update=known))}))
    assert sent == [
        {"version": "3", "start": 0, "end": 1, "replica_id": None},
        {"version": "5", "start": 1, "end": 3, **known, "kv_from": "4"},
    ]
    assert [Span.model_validate(span).oldest_kv for span in sent] == [3, 4]


async def test_a_reply_carries_ids_logprobs_spans_and_the_replica(services):
    reply = await generate(GenerateRequest(token_ids=(5, 6), request_id="mine"), services)
    assert (reply["request_id"], reply["model"], reply["replica_id"]) == ("mine", "tiny", "r1")
    assert reply["choices"] == [
        {
            "index": 0,
            "token_ids": (6, 5),
            "logprobs": {
                "content": [
                    {"token_id": 6, "token": "token_id:6", "logprob": -0.5, "top_logprobs": []},
                    {"token_id": 5, "token": "token_id:5", "logprob": -1.0, "top_logprobs": []},
                ]
            },
            "finish_reason": "length",
            "stop_reason": None,
            "weight_versions": [{"version": "7", "start": 0, "end": 2, "replica_id": "r1"}],
        }
    ]
    assert "prompt_token_ids" not in reply


async def test_the_prefix_caches_tokens_are_told(client, engine):
    assert (await client.generate([5, 6, 7], max_tokens=3)).cached_tokens == 0
    engine.cached_tokens = 2
    assert (await client.generate([5, 6, 7], max_tokens=3)).cached_tokens == 2


async def test_a_prompts_ids_come_back_if_it_was_text_or_if_asked_for(services):
    reply = await generate(GenerateRequest(prompt="ab", output_mode="text"), services)
    assert len(reply["prompt_token_ids"]) == 2 and reply["choices"][0]["text"] == "ba"
    reply = await generate(GenerateRequest(token_ids=(5, 6), return_token_ids=True), services)
    assert reply["prompt_token_ids"] == (5, 6)


@pytest.mark.parametrize(
    ("field", "ids"), [("stop_token_ids", [10**4000] * 64), ("logit_bias", {10**4000 + i: 1.0 for i in range(64)})]
)
async def test_a_refusal_does_not_repeat_long_numbers(services, field, ids):
    with pytest.raises(InvalidRequest, match=f"{field} .* are outside the vocabulary") as refused:
        await generate(GenerateRequest(token_ids=(5,), sampling_params={field: ids}), services)
    assert len(refused.value.message) < 2 * LONGEST_REASON


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_id_beyond_any_number_is_refused(services, stream):
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        await generate(GenerateRequest(token_ids=(2**70,), output_mode="text", stream=stream), services)
