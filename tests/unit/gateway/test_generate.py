"""The request and the reply of ``/inference/v1/generate``, and the sampling parameters of every surface."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from rollout_service.errors import InvalidRequest
from rollout_service.gateway.generate import generate, spans, usage
from rollout_service.protocol.generate import GenerateRequest
from rollout_service.protocol.rollout import Completion, Rollout, Span
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


def test_the_default_is_one_sample_of_the_plain_distribution():
    sampling = Sampling()
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("body", [{}, {"token_ids": [1], "prompt": "1"}, {"sampling_params": {"n": 2}}])
def test_a_prompt_is_given_either_as_ids_or_as_text(body):
    with pytest.raises(ValidationError, match="give either token_ids or prompt"):
        GenerateRequest.model_validate(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", "often"),
        ("stream_options", {"include_usage": True}),
        ("output_mode", "logits"),
        ("request_id", ""),
        ("request_id", "x" * 257),
        ("min_weight_version", -1),
        ("cache_salt", ""),
        ("features", {"mm_hashes": {}}),
        ("kv_transfer_params", {"x": 1}),
        ("token_ids", ["x"]),
        ("token_ids", [[1]]),
        ("token_ids", 5),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field, value):
    with pytest.raises(ValidationError, match=field):
        GenerateRequest.model_validate({"token_ids": [1], field: value})


def test_a_split_completion_names_both_versions_and_replicas():
    moved = tuple(s.model_copy(update={"replica_id": i}) for s, i in zip(SPLIT.spans, "ab", strict=True))
    assert spans(SPLIT.model_copy(update={"spans": moved})) == [
        {"version": "3", "start": 0, "end": 1, "replica_id": "a"},
        {"version": "5", "start": 1, "end": 3, "replica_id": "b"},
    ]


def test_span_with_older_keys_says_their_version_as_text():
    older = tuple(s.model_copy(update={"kv_from": s.version - 1}) for s in SPLIT.spans)
    sent = spans(SPLIT.model_copy(update={"spans": older}))
    assert [span["kv_from"] for span in sent] == ["2", "4"]
    assert [Span.model_validate(span).oldest_kv for span in sent] == [2, 4]


def test_usage_counts_prompts_once_and_every_completion():
    rollout = Rollout(request_id="a", prompt_token_ids=(1, 2), completions=(SPLIT, SPLIT), replica_id="r1")
    assert usage([rollout, rollout]) == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}


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


async def test_a_prompt_as_text_comes_back_as_the_ids_it_became(services):
    reply = await generate(GenerateRequest(prompt="ab", output_mode="text"), services)
    assert len(reply["prompt_token_ids"]) == 2
    assert reply["choices"][0]["text"] == "ba"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_id_beyond_any_number_is_refused(services, stream):
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        await generate(GenerateRequest(token_ids=(2**70,), output_mode="text", stream=stream), services)


async def test_the_prompts_ids_are_repeated_when_asked_for(services):
    reply = await generate(GenerateRequest(token_ids=(5, 6), return_token_ids=True), services)
    assert reply["prompt_token_ids"] == (5, 6)


def test_a_span_names_the_label_of_its_version():
    labelled = SPLIT.model_copy(update={"spans": (SPLIT.spans[0], Span(version=5, start=1, end=3, label="run/step-5"))})
    first, second = spans(labelled)
    assert "label" not in first and second["label"] == "run/step-5"
