"""From what a request says to what an engine can do, or a clear no."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from rollout_service.errors import ContextTooLong, InvalidRequest, NotFound
from rollout_service.gateway import prompts
from rollout_service.gateway.generate import generate
from rollout_service.gateway.models import models
from rollout_service.gateway.prompts import (
    BYTES_PER_TOKEN,
    check_prompt,
    model_and_adapter,
    roll_out,
    tokenize,
)
from rollout_service.gateway.streams import text_of
from rollout_service.protocol.generate import GenerateRequest
from rollout_service.protocol.rollout import Completion, Span
from rollout_service.protocol.sampling import Sampling
from tests.support.tokenizers import sentence_piece
from tests.unit.gateway.fakes import http_to

CONTEXT = 64


class TestModelName:
    async def test_an_alias_is_the_served_model_and_is_listed(self, services):
        services = replace(services, aliases=("org/tiny", "policy"))
        reply = await generate(GenerateRequest(token_ids=(5, 6), model="policy"), services)
        assert reply["model"] == "policy"
        assert [card["id"] for card in (await models(services))["data"]] == ["tiny", "org/tiny", "policy"]
        with pytest.raises(
            NotFound, match="'gpt' is not served here; 'tiny' and 'org/tiny' and 'policy' is"
        ) as refused:
            await model_and_adapter("gpt", None, services)
        assert refused.value.detail == {"served": ["tiny", "org/tiny", "policy"]}


def ended(ids: tuple[int, ...], stop: str | None) -> Completion:
    spans = (Span(version=0, start=0, end=len(ids)),)
    logprobs = (0.0,) * len(ids)
    return Completion(index=0, token_ids=ids, logprobs=logprobs, finish_reason="stop", stop_reason=stop, spans=spans)


class TestText:
    async def test_every_route_keeps_the_space_that_text_begins_with(self, services):
        tokenizer = sentence_piece()
        services = replace(services, tokenizer=tokenizer, vocab_size=len(tokenizer))
        ids = tokenizer.convert_tokens_to_ids(["x", "▁Paris"])  # the engine answers with these in reverse
        asked = {"token_ids": ids, "output_mode": "text"}
        async with http_to(services) as http:
            native = (await http.post("/inference/v1/generate", json=asked)).json()
            events = (await http.post("/inference/v1/generate", json=asked | {"stream": True})).text
            completions = (await http.post("/v1/completions", json={"prompt": ids, "logprobs": 0})).json()
            sglang = (await http.post("/generate", json={"input_ids": ids})).json()
        assert native["choices"][0]["text"] == completions["choices"][0]["text"] == sglang["text"] == " Parisx"
        assert completions["choices"][0]["logprobs"]["tokens"] == [" Paris", "x"]
        assert '"text": " Parisx"' in events

    async def test_routes_for_text_take_add_special_tokens(self, services, http):
        assert services.tokenizer is not None
        services.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
        )
        for add, number in ((None, 1), (True, 2), (False, 1)):
            option = {} if add is None else {"add_special_tokens": add}
            asked = {"prompt": "<bos>ab", **option}
            native = (await http.post("/inference/v1/generate", json=asked)).json()
            assert native["prompt_token_ids"].count(1) == number
            asked |= {"return_token_ids": True}
            completions = (await http.post("/v1/completions", json=asked)).json()
            assert completions["choices"][0]["prompt_token_ids"].count(1) == number

    @pytest.mark.parametrize(
        ("added", "text", "add", "wanted"),
        [
            ("<bos> $A", "<bos>ab", None, [1]),
            ("<bos> $A", "ab", None, [1]),
            ("<bos> $A", "<bos>ab", True, [1, 1]),
            ("<bos> $A", "<bos>ab", False, [1]),
            ("<bos> $A", "ab", False, []),
            ("<bos> $A", "<bos><bos>ab", None, [1, 1]),
            ("<bos> <eos> $A", "<bos><eos>ab", None, [1, 2]),  # GLM's texts begin with two tokens
            ("<bos> <eos> $A", "ab", None, [1, 2]),
            ("<bos> $A <eos>", "<bos>ab", None, [1, 2]),
            ("$A", "<bos><bos>ab", None, [1, 1]),  # the tokenizer adds none
        ],
    )
    async def test_text_has_as_many_beginnings_of_sequence_as_meant(self, services, added, text, add, wanted):
        assert services.tokenizer is not None
        services.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=added, pair=f"{added} $B", special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
        [ids] = await tokenize([text], services, add)
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

    @pytest.fixture
    def gated(self, services, monkeypatch):
        """Services whose gated tokenizer takes one text at a time."""
        monkeypatch.setattr(prompts, "_tokenizing", ThreadPoolExecutor(1))
        monkeypatch.setattr(prompts, "_TOKENIZED_AT_ONCE", 1)
        return replace(services, tokenizer=GatedTokenizer(services.tokenizer))

    async def test_many_texts_leave_the_tokenizer_to_others(self, gated):
        many, tokenizer = await begin_many(gated), gated.tokenizer
        one = asyncio.create_task(tokenize(["b"], gated, add_special_tokens=False))
        await asyncio.sleep(0)  # its text is queued
        tokenizer.gate.set()
        await asyncio.gather(many, one)
        assert tokenizer.encoded == ["aa", "b", "ab", "ac"]

    async def test_texts_of_a_client_that_left_are_not_tokenized(self, gated):
        left, tokenizer = await begin_many(gated), gated.tokenizer
        left.cancel()
        await asyncio.wait([left])
        tokenizer.gate.set()
        await tokenize(["b"], gated, add_special_tokens=False)
        assert tokenizer.encoded == ["aa", "b"]


async def begin_many(gated: Any) -> asyncio.Task[list[tuple[int, ...]]]:
    """Begin to tokenize three texts, the first of which waits for the gate."""
    many = asyncio.create_task(tokenize(["aa", "ab", "ac"], gated, add_special_tokens=False))
    await asyncio.to_thread(gated.tokenizer.entered.wait)
    return many


class GatedTokenizer:
    """Encodes once its gate is open."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.entered, self.gate = tokenizer, threading.Event(), threading.Event()
        self.all_special_ids = tokenizer.all_special_ids
        self.encoded: list[str] = []

    def encode(self, text: str, **kwargs: Any) -> Any:
        self.encoded.append(text)
        self.entered.set()
        self.gate.wait()
        return self._tokenizer.encode(text, **kwargs)


class TestCheckPrompt:
    @pytest.mark.parametrize("token", [-1, 128, 10**12])
    def test_the_first_invalid_token_id_is_named_with_its_position(self, services, token):
        with pytest.raises(InvalidRequest, match=rf"token id {token} at position 2 .* \[0, 128\)") as refused:
            check_prompt((0, 127, token, -5), Sampling(), services)
        assert refused.value.detail == {"position": 2, "token_id": token, "vocab_size": 128}

    def test_a_prompt_that_leaves_no_room_is_refused(self, services):
        check_prompt((5,) * (CONTEXT - 1), Sampling(max_tokens=CONTEXT), services)
        with pytest.raises(ContextTooLong, match=f"{CONTEXT} tokens.*maximum context length of {CONTEXT}") as refused:
            check_prompt((5,) * CONTEXT, Sampling(max_tokens=1), services)
        assert refused.value.detail == {"prompt_tokens": CONTEXT, "max_model_len": CONTEXT}

    @pytest.mark.parametrize(
        ("taken", "refused", "why"),
        [
            ({"stop_token_ids": (0, 127)}, {"stop_token_ids": (-1, 3, 128)}, r"stop_token_ids \[-1, 128\] are outside"),
            (
                {"min_tokens": 3, "max_tokens": 3},
                {"min_tokens": 4, "max_tokens": 3},
                "min_tokens=4 is above max_tokens=3",
            ),
            ({"min_tokens": 62}, {"min_tokens": 63}, "min_tokens=63 that is .* context length of 64"),
            ({"logprobs": 20}, {"logprobs": 21}, "logprobs=21.*at most 20 .*engine.max_logprobs"),
            ({"prompt_logprobs": 20}, {"prompt_logprobs": 21}, "prompt_logprobs=21.*at most 20 "),
        ],
    )
    def test_parameters_are_bounded_by_the_model_and_the_engine(self, services, taken, refused, why):
        check_prompt((5, 6), Sampling.model_validate(taken), services)
        with pytest.raises(InvalidRequest, match=why):
            check_prompt((5, 6), Sampling.model_validate(refused), services)


class TestRollOut:
    @pytest.mark.parametrize(
        ("asked", "partial", "granted"),
        [
            (None, (), CONTEXT - 2),
            (CONTEXT - 3, (), CONTEXT - 3),
            (CONTEXT - 1, (), CONTEXT - 2),
            (10**6, (7, 8, 9), CONTEXT - 5),
        ],
    )
    async def test_a_completion_gets_what_the_context_leaves(self, services, engine, asked, partial, granted):
        first = await roll_out((5, 6), Sampling(max_tokens=asked), services, partial=partial)
        assert engine.calls[0].sampling.max_tokens == granted
        second = await roll_out((5, 6), Sampling(), services)
        assert first.request_id != second.request_id
