"""From what a request says to what an engine can do, or a clear no."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest
from httpx import ASGITransport
from tokenizers.processors import TemplateProcessing

from rollout_service.errors import ContextTooLong, InvalidRequest, NotFound
from rollout_service.gateway.deployment import create_app
from rollout_service.gateway.generate import generate
from rollout_service.gateway.models import models
from rollout_service.gateway.prompts import (
    BYTES_PER_TOKEN,
    check_prompt,
    model_and_adapter,
    roll_out,
    text_of,
    tokenize,
)
from rollout_service.protocol.generate import GenerateRequest, RolloutOptions
from rollout_service.protocol.rollout import Completion, Span
from rollout_service.protocol.sampling import Sampling
from tests.support.tokenizers import sentence_piece
from tests.unit.gateway.chats import URL

CONTEXT = 64


class TestModelName:
    async def test_another_model_is_not_found_and_the_served_one_is_named(self, services):
        with pytest.raises(NotFound, match="'gpt' is not served here; 'tiny' is") as refused:
            await model_and_adapter("gpt", None, services)
        assert refused.value.detail == {"served": ["tiny"]}

    async def test_an_alias_is_the_served_model_and_is_listed(self, services):
        services = replace(services, aliases=("org/tiny", "policy"))
        reply = await generate(GenerateRequest(token_ids=(5, 6), model="policy"), services)
        assert reply["model"] == "policy"
        assert [card["id"] for card in (await models(services))["data"]] == ["tiny", "org/tiny", "policy"]
        with pytest.raises(NotFound, match="'tiny' and 'org/tiny' and 'policy' is"):
            await model_and_adapter("gpt", None, services)


def ended(ids: tuple[int, ...], stop: str | None) -> Completion:
    spans = (Span(version=0, start=0, end=len(ids)),)
    logprobs = (0.0,) * len(ids)
    return Completion(index=0, token_ids=ids, logprobs=logprobs, finish_reason="stop", stop_reason=stop, spans=spans)


class TestText:
    @pytest.mark.parametrize(
        ("text", "add", "number"),
        [
            ("<s>q", None, 1),
            ("q", None, 1),
            ("<s>q", True, 2),
            ("<s>q", False, 1),
            ("q", False, 0),
            ("<s><s>q", None, 2),
        ],
    )
    async def test_text_has_as_many_beginnings_of_sequence_as_meant(self, services, text, add, number):
        tokenizer = sentence_piece()
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
        [ids] = await tokenize([text], replace(services, tokenizer=tokenizer), add)
        assert ids.count(1) == number

    async def test_every_route_keeps_the_space_that_text_begins_with(self, services):
        tokenizer = sentence_piece()
        services = replace(services, tokenizer=tokenizer, vocab_size=len(tokenizer))
        ids = tokenizer.convert_tokens_to_ids(["x", "▁Paris"])  # the engine answers with these in reverse
        asked = {"token_ids": ids, "output_mode": "text"}
        async with httpx.AsyncClient(transport=ASGITransport(app=create_app(services)), base_url=URL) as http:
            native = (await http.post("/inference/v1/generate", json=asked)).json()
            events = (await http.post("/inference/v1/generate", json=asked | {"stream": True})).text
            completions = (await http.post("/v1/completions", json={"prompt": ids, "logprobs": 0})).json()
            sglang = (await http.post("/generate", json={"input_ids": ids})).json()
        assert native["choices"][0]["text"] == completions["choices"][0]["text"] == sglang["text"] == " Parisx"
        assert completions["choices"][0]["logprobs"]["tokens"] == [" Paris", "x"]
        assert '"text": " Parisx"' in events

    async def test_routes_for_text_take_add_special_tokens(self, services):
        assert services.tokenizer is not None
        services.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
        )
        async with httpx.AsyncClient(transport=ASGITransport(app=create_app(services)), base_url=URL) as http:
            for add, number in ((None, 1), (True, 2), (False, 1)):
                option = {} if add is None else {"add_special_tokens": add}
                asked = {"prompt": "<bos>ab", **option}
                native = (await http.post("/inference/v1/generate", json=asked)).json()
                assert native["prompt_token_ids"].count(1) == number
                asked |= {"return_token_ids": True}
                completions = (await http.post("/v1/completions", json=asked)).json()
                assert completions["choices"][0]["prompt_token_ids"].count(1) == number

    @pytest.mark.parametrize(
        ("added", "text", "wanted"),
        [
            ("<bos> <eos> $A", "<bos><eos>ab", [1, 2]),  # GLM's texts begin with two tokens
            ("<bos> <eos> $A", "ab", [1, 2]),
            ("<bos> $A <eos>", "<bos>ab", [1, 2]),
            ("$A", "<bos><bos>ab", [1, 1]),  # the tokenizer adds none
        ],
    )
    async def test_text_gets_no_second_start(self, services, added, text, wanted):
        assert services.tokenizer is not None
        services.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=added, pair=f"{added} $B", special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
        [ids] = await tokenize([text], services)
        assert [token for token in ids if token in (1, 2)] == wanted

    async def test_special_tokens_are_left_out_of_text_unless_asked_for(self, services):
        assert services.tokenizer is not None
        [ab] = await tokenize(["ab"], services)
        completion = ended((*ab, services.tokenizer.eos_token_id), None)
        kept = Sampling(include_stop_str_in_output=True)
        assert text_of(completion, kept, services) == "ab"
        assert text_of(completion, kept.model_copy(update={"skip_special_tokens": False}), services) == "ab<eos>"

    @pytest.mark.parametrize(
        ("text", "stop", "trimmed", "whole"),
        [
            ("abc", None, "ab", "abc"),  # an end of sequence, or a stop token
            ("abc", "c", "ab", "abc"),
            ("abc", "bc", "a", "abc"),
            ("cabc", "c", "cab", "cabc"),  # the first one came before min_tokens
            ("abc", "x", "abc", "abc"),
        ],
    )
    async def test_text_ends_where_vllm_ends_it(self, services, text, stop, trimmed, whole):
        [ids] = await tokenize([text], services)
        completion = ended(ids, stop)
        assert text_of(completion, Sampling(), services) == trimmed
        assert text_of(completion, Sampling(include_stop_str_in_output=True), services) == whole

    async def test_text_without_a_tokenizer_is_refused_with_what_to_send(self, no_tokenizer):
        with pytest.raises(InvalidRequest, match="tiny has no tokenizer: send token ids"):
            await tokenize(["ab"], no_tokenizer)
        assert text_of(ended((5,), None), Sampling(), no_tokenizer) is None

    def test_a_stop_string_without_a_tokenizer_is_refused(self, no_tokenizer):
        check_prompt((5,), Sampling(stop_token_ids=(3,)), no_tokenizer)
        with pytest.raises(InvalidRequest, match="use stop_token_ids instead of stop"):
            check_prompt((5,), Sampling(stop=("x",)), no_tokenizer)

    async def test_text_beyond_the_context_is_refused_before_tokenization(self, services):
        limit = BYTES_PER_TOKEN * CONTEXT
        tokenizer = GatedTokenizer(services.tokenizer)  # of which nobody opens the gate
        with pytest.raises(InvalidRequest, match=f"{limit + 1} bytes of text, and .* length of {CONTEXT} tokens"):
            await tokenize(["ab", "é" * (limit // 2) + "x"], replace(services, tokenizer=tokenizer))

    async def test_other_requests_are_answered_while_text_is_tokenized(self, services):
        tokenizer = GatedTokenizer(services.tokenizer)
        gated = replace(services, tokenizer=tokenizer)
        text = asyncio.create_task(generate(GenerateRequest(prompt="ab"), gated))
        await asyncio.to_thread(
            tokenizer.entered.wait
        )  # were it the event loop that waits in there, nothing would go on
        ids = await generate(GenerateRequest(token_ids=(5, 6)), gated)
        assert ids["choices"][0]["token_ids"] == (6, 5) and not text.done()
        tokenizer.gate.set()
        assert len((await text)["prompt_token_ids"]) == 2


class GatedTokenizer:
    """Encodes once its gate is open."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.entered, self.gate = tokenizer, threading.Event(), threading.Event()
        self.all_special_ids = tokenizer.all_special_ids

    def encode(self, text: str, **kwargs: Any) -> Any:
        self.entered.set()
        self.gate.wait()
        return self._tokenizer.encode(text, **kwargs)


class TestCheckPrompt:
    @pytest.mark.parametrize("token", [-1, 128, 10**12])
    def test_the_first_invalid_token_id_is_named_with_its_position(self, services, token):
        with pytest.raises(InvalidRequest, match=rf"token id {token} at position 2 .* \[0, 128\)") as refused:
            check_prompt((0, 127, token, -5), Sampling(), services)
        assert refused.value.detail == {"position": 2, "token_id": token, "vocab_size": 128}

    def test_stop_ids_outside_the_vocabulary_are_all_named(self, services):
        with pytest.raises(InvalidRequest, match=r"stop_token_ids \[-1, 128\] are outside the vocabulary \[0, 128\)"):
            check_prompt((5,), Sampling(stop_token_ids=(-1, 3, 128)), services)

    def test_a_prompt_that_leaves_no_room_is_refused(self, services):
        check_prompt((5,) * (CONTEXT - 1), Sampling(max_tokens=CONTEXT), services)
        with pytest.raises(ContextTooLong, match=f"{CONTEXT} tokens.*maximum context length of {CONTEXT}") as refused:
            check_prompt((5,) * CONTEXT, Sampling(max_tokens=1), services)
        assert refused.value.detail == {"prompt_tokens": CONTEXT, "max_model_len": CONTEXT}

    def test_a_minimum_above_the_maximum_is_refused(self, services):
        check_prompt((5,), Sampling(min_tokens=3, max_tokens=3), services)
        with pytest.raises(InvalidRequest, match="min_tokens=4 is above max_tokens=3"):
            check_prompt((5,), Sampling(min_tokens=4, max_tokens=3), services)

    def test_a_minimum_above_what_the_context_leaves_is_refused(self, services):
        check_prompt((5, 6), Sampling(min_tokens=CONTEXT - 2), services)
        with pytest.raises(InvalidRequest, match=f"min_tokens={CONTEXT - 1} that is .* context length of {CONTEXT}"):
            check_prompt((5, 6), Sampling(min_tokens=CONTEXT - 1), services)

    @pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
    def test_logprobs_are_bounded_by_the_engines_setting(self, services, name):
        check_prompt((5,), Sampling.model_validate({name: 40}), replace(services, max_logprobs=40))
        with pytest.raises(InvalidRequest, match=f"{name}=41.*at most 40 .*engine.max_logprobs"):
            check_prompt((5,), Sampling.model_validate({name: 41}), replace(services, max_logprobs=40))
        with pytest.raises(InvalidRequest, match=f"{name}=21.*at most 20 "):
            check_prompt((5,), Sampling.model_validate({name: 21}), services)


class TestRollOut:
    @pytest.mark.parametrize(
        ("asked", "granted"), [(None, CONTEXT - 2), (CONTEXT - 3, CONTEXT - 3), (CONTEXT - 1, CONTEXT - 2), (10**6, 62)]
    )
    async def test_a_completion_gets_what_the_context_leaves(self, services, engine, asked, granted):
        await roll_out((5, 6), Sampling(max_tokens=asked), services)
        assert engine.calls[0].sampling.max_tokens == granted

    async def test_a_continued_completion_gets_what_is_left(self, services, engine):
        await roll_out((5, 6), Sampling(max_tokens=10**6), services, partial=(7, 8, 9))
        assert engine.calls[0].sampling.max_tokens == CONTEXT - 5

    async def test_a_rollout_hands_on_what_was_asked(self, services, engine):
        sampling = Sampling(n=2, max_tokens=4, temperature=0.5)
        rollout = await roll_out((5, 6), sampling, services, RolloutOptions(request_id="mine", min_weight_version=3))
        call = engine.calls[0]
        assert (call.request_id, call.prompt_token_ids, call.sampling, call.min_weight_version) == (
            "mine",
            (5, 6),
            sampling,
            3,
        )
        assert rollout.request_id == "mine" and len(rollout.completions) == 2

    async def test_rollouts_without_an_id_get_one_each(self, services, engine):
        first, second = [await roll_out((5,), Sampling(), services) for _ in range(2)]
        assert first.request_id != second.request_id
