"""The request and the reply of ``/v1/completions``."""

import json
from typing import Any

import pytest
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from rollout_service.errors import ContextTooLong, InvalidRequest, NonFiniteLogprob, from_wire
from rollout_service.gateway.completions import CompletionRequest, completions
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.sampling import GenerateCall, Sampling
from tests.unit.gateway.fakes import EchoEngine, with_engine


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "ab", **fields})


class TestRequest:
    @pytest.mark.parametrize(
        ("fields", "sampling"),
        [
            ({}, {"max_tokens": 16}),
            ({"n": 3, "temperature": 0.5, "seed": 1, "ignore_eos": True, "max_tokens": None}, {"max_tokens": None}),
            ({"max_completion_tokens": 7}, {"max_tokens": 7}),
            ({"max_completion_tokens": 7, "max_tokens": 7}, {}),
            ({"stop": "x", "stop_token_ids": None}, {"stop": ("x",), "stop_token_ids": ()}),
            ({"stop": ["x", "yz"]}, {"stop": ("x", "yz")}),
            ({"stop": None, "logprobs": False}, {"stop": (), "logprobs": None}),
            ({"logprobs": True}, {"logprobs": 0}),
            ({"logprobs": 20}, {}),
        ],
    )
    def test_fields_beside_the_prompt_become_sampling_parameters(self, fields, sampling):
        same = {"max_tokens": 16, "logprobs": None, **fields} | sampling
        same.pop("max_completion_tokens", None)
        assert request(**fields).sampling() == Sampling.model_validate(same)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("stream", "often"),
            ("stream_options", {"include_usage": True}),
            ("best_of", 2),
            ("suffix", "x"),
            ("logit_bias", {"5": 101}),
            ("logprobs", -1),
            ("use_beam_search", True),
            ("n", 0),
            ("temperature", float("nan")),
            ("max_tokens", 0),
            ("prompt", 5),
            ("prompt", [1, "x"]),
            ("prompt", None),
            ("max_completion_tokens", 7),
        ],
    )
    def test_unsupported_or_out_of_range_fields_are_refused_by_name(self, field, value):
        with pytest.raises(ValidationError, match=field):
            request(**{"max_tokens": 8, field: value})

    @pytest.mark.parametrize(
        ("prompt", "prompts"),
        [
            ("ab", ["ab"]),
            (["ab", "c"], ["ab", "c"]),
            ([36, 37], [(36, 37)]),
            ([[36], [37, 38]], [(36,), (37, 38)]),
        ],
    )
    async def test_a_prompt_is_text_or_ids_one_or_several(self, services, engine, prompt, prompts):
        assert services.tokenizer is not None
        await completions(request(prompt=prompt), services)
        expected = [tuple(services.tokenizer.encode(p)) if isinstance(p, str) else p for p in prompts]
        assert sorted(call.prompt_token_ids for call in engine.calls) == sorted(expected)

    @pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["ab", ""]])
    async def test_an_empty_prompt_anywhere_is_refused(self, services, prompt):
        with pytest.raises(InvalidRequest, match="prompt is empty"):
            await completions(request(prompt=prompt), services)

    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            ([4096], "prompt 57 of 121, counted from 0: token id 4096 at position 0"),
            ([5] * 64, "prompt 57 of 121, counted from 0: the prompt has 64 tokens"),
            ([], "prompt 57 of 121, counted from 0: the prompt is empty"),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_bad_prompt_is_named_before_any_is_sampled(self, services, engine, bad, says, stream):
        prompts = [[5]] * 57 + [bad] + [[6]] * 42 + [bad] + [[7]] * 20
        with pytest.raises(InvalidRequest, match=says) as refused:
            await completions(request(prompt=prompts, stream=stream), services)
        assert refused.value.detail["prompts"] == [57, 100] and "prompts 100 are refused, too" in refused.value.message
        assert engine.calls == []

    async def test_a_text_that_is_too_long_is_named(self, services, engine):
        for text in ("a" * 70, "a" * 70_000):
            with pytest.raises(ContextTooLong, match="prompt 1 of 4, counted from 0: the prompt has 70") as refused:
                await completions(request(prompt=["ab", text, "c", text]), services)
            assert refused.value.detail["prompts"] == [1, 3]
        assert engine.calls == []

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_prompt_that_fails_later_is_named(self, services, stream):
        class Fails(EchoEngine):
            async def generate(self, call: GenerateCall) -> Rollout:
                if call.prompt_token_ids == (6,):
                    raise NonFiniteLogprob("token 3 has logprob nan")
                return await super().generate(call)

        with pytest.raises(NonFiniteLogprob, match="prompt 1 of 2, counted from 0: token 3"):
            reply = await completions(request(prompt=[[5], [6]], stream=stream), with_engine(services, Fails()))
            assert isinstance(reply, StreamingResponse)  # the other prompt's tokens came first: an event says it
            text = "".join([str(line) async for line in reply.body_iterator])
            raise from_wire(500, json.loads(text.split("data: ")[-2]))


class TestReply:
    async def test_choices_are_numbered_prompt_by_prompt(self, services, engine):
        asked = request(prompt=["ab", "c"], n=2, request_id="mine", min_weight_version=4)
        reply = await completions(asked, services)
        assert [(c["index"], c["text"]) for c in reply["choices"]] == [(0, "ba"), (1, "ba"), (2, "c"), (3, "c")]
        assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
        assert (reply["object"], reply["model"], reply["id"]) == ("text_completion", "tiny", "mine")
        assert sorted((call.request_id, call.min_weight_version) for call in engine.calls) == [
            ("mine-0", 4),
            ("mine-1", 4),
        ]

    async def test_logprobs_are_aligned_with_tokens_and_text(self, services):
        reply = await completions(request(logprobs=0), services)
        assert reply["choices"][0]["logprobs"] == {
            "tokens": ["b", "a"],
            "token_logprobs": [-0.5, -1.0],
            "text_offset": [0, 1],
            "top_logprobs": [{"b": -0.5}, {"a": -1.0}],
        }
        assert (await completions(request(), services))["choices"][0]["logprobs"] is None

    async def test_ids_are_returned_when_asked_for_and_versions_always(self, services):
        choice = (await completions(request(prompt=[36, 37], return_token_ids=True), services))["choices"][0]
        assert choice["token_ids"] == (37, 36) and choice["prompt_token_ids"] == (36, 37)
        assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 2, "replica_id": "r1"}]
        assert "token_ids" not in (await completions(request(), services))["choices"][0]

    async def test_a_model_without_a_tokenizer_completes_ids(self, no_tokenizer):
        reply = await completions(request(prompt=[36, 37], logprobs=0), no_tokenizer)
        choice = reply["choices"][0]
        assert choice["text"] == "" and choice["logprobs"]["tokens"] == ["token_id:37", "token_id:36"]
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await completions(request(), no_tokenizer)
