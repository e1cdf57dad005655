"""Streams while tokens are made: every route sends them as they come, and all together are the whole reply."""

import asyncio
import itertools
import json
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from rollout_service.client import RolloutClient
from rollout_service.errors import InvalidRequest, NonFiniteLogprob, RolloutServiceError
from rollout_service.fleet.continuation import slice_completion
from rollout_service.gateway.dependencies import Services
from rollout_service.model.tiny import EOS, VOCABULARY
from rollout_service.protocol.progress import Piece, ProgressAsk, ProgressReply
from rollout_service.protocol.rollout import Candidate, Completion, Rollout, Span
from rollout_service.protocol.sampling import GenerateCall
from rollout_service.protocol.sessions import OpenSession
from rollout_service.runtime.placements import PLACEMENTS
from rollout_service.sessions.store import SessionStore
from tests.unit.gateway.chats import HELLO, chunks_of, events_of, ids, spans
from tests.unit.gateway.fakes import call_and_leave, client_of, http_to, with_engine

TEXT = "hello, world"
STEPS = (1, 4, 5, 11)
"""Tokens of each completion that are told at a time; the rest comes with the reply."""


@dataclass
class TellingEngine:
    """Says ``TEXT`` and the end of sequence under versions 3 and 4, and tells some of it before."""

    error: RolloutServiceError | None = None
    """Raised in place of the reply."""
    calls: list[GenerateCall] = field(default_factory=list)
    cancelled: int = 0
    told: dict[int, int] = field(default_factory=dict)
    """Steps of each call that were told."""
    all_told: dict[int, asyncio.Event] = field(default_factory=dict)
    replies: bool = True
    """Or it never does."""

    async def generate(self, call: GenerateCall) -> Rollout:
        assert call.live
        self.calls.append(call)
        self.told[call.number], self.all_told[call.number] = 0, asyncio.Event()
        PLACEMENTS.note(call.origin, call.number, "r1")
        try:
            await self.all_told[call.number].wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        wholes = tuple(self.whole(call, index) for index in range(call.sampling.n))
        return Rollout(
            request_id=call.request_id, prompt_token_ids=call.prompt_token_ids, completions=wholes, replica_id="r1"
        )

    async def progress(self, ask: ProgressAsk) -> ProgressReply:
        await asyncio.sleep(0)
        if not self.replies and set(self.told.values()) == {len(STEPS)}:
            await asyncio.Event().wait()
        pieces = []
        for call in self.calls:
            told = self.told[call.number]
            if told == len(STEPS):
                assert self.replies
                self.all_told[call.number].set()
                continue
            start, end = (0, *STEPS)[told], STEPS[told]
            for index in range(call.sampling.n):
                made = slice_completion(self.whole(call, index), start, end)
                made = made.model_copy(update={"finish_reason": "abort", "stop_reason": None})
                pieces.append(Piece(call=call.number, start=start, made=made))
            self.told[call.number] += 1
        return ProgressReply(number=ask.acknowledged + 1, pieces=tuple(pieces))

    def whole(self, call: GenerateCall, index: int) -> Completion:
        tokens = (*ids(TEXT), VOCABULARY.index(EOS))
        k = call.sampling.logprobs or 0
        return Completion(
            index=index,
            token_ids=tokens,
            logprobs=tuple(-0.1 * at for at in range(len(tokens))),
            finish_reason="stop",
            spans=(Span(version=3, start=0, end=3), Span(version=4, start=3, end=len(tokens))),
            top_logprobs=tuple((Candidate(t, -0.5, 1), Candidate(5, -2.0, 2))[:k] for t in tokens) if k else None,
        )


@pytest.fixture
def telling() -> TellingEngine:
    return TellingEngine()


@pytest.fixture
def http(chatting: Services, telling: TellingEngine) -> httpx.AsyncClient:
    return http_to(with_engine(chatting, telling))


@pytest.fixture
def client(chatting: Services, telling: TellingEngine) -> RolloutClient:
    return client_of(with_engine(chatting, telling))


async def streamed(http: httpx.AsyncClient, path: str, **body: object) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    reply = await http.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return chunks_of(reply.text)


def of_choice(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


WHOLE_SPANS = [("3", 0, 3), ("4", 3, 13)]


class TestGenerate:
    @pytest.mark.parametrize("flat", [False, True])
    async def test_tokens_come_as_they_are_made(self, http, flat):
        sampling = {"n": 2, "logprobs": 0}
        asked = {"token_ids": [5, 6], "sampling_params": sampling, "flat_logprobs": flat, "request_id": "mine"}
        chunks = await streamed(http, "/inference/v1/generate", **asked)
        assert {chunk["request_id"] for chunk in chunks} == {"mine"} and len(chunks) == 10
        for index in range(2):
            choices = of_choice(chunks, index)
            assert [len(c["token_ids"]) for c in choices] == [1, 3, 1, 6, 2]
            assert [t for c in choices for t in c["token_ids"]] == [*ids(TEXT), VOCABULARY.index(EOS)]
            logprobs = [c["logprobs"] if flat else [t["logprob"] for t in c["logprobs"]["content"]] for c in choices]
            assert list(itertools.chain(*logprobs)) == pytest.approx([-0.1 * at for at in range(13)])
            assert [c["finish_reason"] for c in choices] == [None] * 4 + ["stop"]
            assert [spans(c["weight_versions"]) for c in choices] == [
                [("3", 0, 1)], [("3", 1, 3), ("4", 3, 4)], [("4", 4, 5)], [("4", 5, 11)], WHOLE_SPANS,
            ]  # fmt: skip

    async def test_text_and_usage_where_they_are_asked_for(self, http):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await streamed(http, "/inference/v1/generate", prompt="hi", output_mode="text", stream_options=options)
        *pieces, last = chunks
        assert "".join(choice["text"] for choice in of_choice(pieces, 0)) == TEXT
        assert [("prompt_token_ids" in chunk) for chunk in chunks] == [True] + [False] * 5
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 4, 5, 11, 13, 13]
        assert (last["choices"], last["replica_id"], last["attempts"], last["truncated_sampling"]) == (
            [],
            "r1",
            1,
            False,
        )

    async def test_a_completion_that_an_earlier_request_began_goes_on(self, http, telling):
        began = "I said: "
        body = {
            "token_ids": [5, 6],
            "partial_token_ids": ids(began),
            "output_mode": "text",
            "sampling_params": {"max_tokens": 30, "min_tokens": 9, "seed": 3, "presence_penalty": 0.5},
        }
        chunks = await streamed(http, "/inference/v1/generate", **body, stream_options={"include_usage": True})
        *pieces, last = chunks
        choices = of_choice(pieces, 0)
        assert "".join(choice["text"] for choice in choices) == began + TEXT
        assert [t for c in choices for t in c["token_ids"]] == [*ids(TEXT), VOCABULARY.index(EOS)]
        assert last["usage"] == {"prompt_tokens": 10, "completion_tokens": 13, "total_tokens": 23}
        [call] = telling.calls
        assert call.prompt_token_ids == (5, 6, *ids(began)) and call.partial_tokens == 8
        assert (call.sampling.max_tokens, call.sampling.min_tokens) == (22, 1) and call.sampling.seed not in (None, 3)

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ({"sampling_params": {"n": 2}}, "partial_token_ids belong to one completion, but n=2"),
            ({"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs are not computed with partial_token_ids"),
            ({"sampling_params": {"max_tokens": 3}}, "partial_token_ids has 3 tokens, and max_tokens=3 counts them"),
            ({"sampling_params": {"structured_outputs": {"regex": "a"}}}, "structured_outputs, which vLLM cannot take"),
            ({"return_routed_experts": True}, "routed experts of partial_token_ids are unknown"),
            ({"token_ids": []}, "the prompt is empty: send the tokens before partial_token_ids"),
            ({"partial_token_ids": [5, 999]}, "token id 999 at position 2 is outside the vocabulary"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    async def test_what_cannot_go_on_is_refused_by_name(self, http, wrong, says):
        body = {"token_ids": [5], "partial_token_ids": [5, 6, 7], **wrong}
        refused = await http.post("/inference/v1/generate", json=body)
        assert refused.status_code == 422 and says in refused.text


class TestCompletions:
    async def test_several_prompts_come_side_by_side(self, http):
        asked = {"prompt": [[5, 6], [7]], "n": 2, "logprobs": 1, "max_tokens": 13, "return_token_ids": True}
        chunks = await streamed(http, "/v1/completions", **asked, stream_options={"include_usage": True})
        *pieces, last = chunks
        assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 52, "total_tokens": 55}
        assert (last["choices"], last["attempts"]) == ([], 1)
        body = {**asked, "stream": False}
        for index in range(4):
            choices = of_choice(pieces, index)
            assert "".join(choice["text"] for choice in choices) == TEXT
            tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
            assert "".join(tokens[:-1]) == TEXT and len(tokens) == 13
            offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
            assert offsets == list(range(13))
            assert choices[0]["prompt_token_ids"] == body["prompt"][index // 2]
            assert spans(choices[-1]["weight_versions"]) == WHOLE_SPANS and choices[-1]["finish_reason"] == "stop"

    async def test_what_may_be_the_beginning_of_a_stop_string_is_held_back(self, http):
        chunks = await streamed(http, "/v1/completions", prompt="hi", stop=["lo!"], max_tokens=13)
        assert [choice["text"] for choice in of_choice(chunks, 0)] == ["", "he", "l", "lo, wo", "rld"]
        chunks = await streamed(http, "/v1/completions", prompt="hi", stop=["loooooong"], max_tokens=13)
        assert [choice["text"] for choice in of_choice(chunks, 0)] == ["", "", "", "hel", "lo, world"]

    async def test_an_error_before_the_first_token_is_an_http_error(self, http, telling):
        reply = await http.post("/v1/completions", json={"prompt": [9999], "stream": True})
        assert reply.status_code == 422 and telling.calls == []

    async def test_a_later_error_is_the_last_event(self, http, telling):
        telling.error = NonFiniteLogprob("broken weights", {"position": 3})
        for prompt in ([5], [[5], [6]]):
            *pieces, last = await streamed(http, "/v1/completions", prompt=prompt, max_tokens=13)
            assert pieces and last["error"]["type"] == "NonFiniteLogprob"
            assert last["error"]["detail"]["position"] == 3


class TestChat:
    async def test_text_comes_as_it_is_made(self, http):
        chunks = await streamed(http, "/v1/chat/completions", model="tiny", messages=HELLO, n=2, logprobs=True)
        for index in range(2):
            choices = of_choice(chunks, index)
            said = [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]
            assert said == ["h", "ell", "o", ", worl", "d"]
            logprobs = [t["logprob"] for c in choices for t in (c.get("logprobs") or {"content": []})["content"]]
            assert logprobs == pytest.approx([-0.1 * at for at in range(13)])
            [end] = [choice for choice in choices if choice["finish_reason"]]
            assert end["finish_reason"] == "stop" and spans(end["weight_versions"]) == WHOLE_SPANS

    async def test_so_it_does_for_anthropic_and_openais_responses(self, http):
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": HELLO, "stream": True}
        events = events_of((await http.post("/v1/messages", json=body)).text)
        assert [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"] == [
            "h", "ell", "o", ", worl", "d",
        ]  # fmt: skip
        reply = await http.post("/v1/responses", json={"model": "tiny", "input": "hi", "stream": True})
        events = events_of(reply.text)
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == TEXT and len(deltas) > 1


class TestClient:
    async def test_pieces_and_then_the_whole(self, client, telling):
        async with client:
            async with client.generate_stream("hi", n=2, priority=1, seed=4) as stream:
                with pytest.raises(RuntimeError, match="not over"):
                    _ = stream.rollout
                pieces = [piece async for piece in stream]
            whole = stream.rollout
        assert (telling.calls[0].priority, telling.calls[0].sampling.seed) == (1, 4)
        for completion in whole.completions:
            own = [piece for piece in pieces if piece.index == completion.index]
            assert [len(piece.token_ids) for piece in own] == [1, 3, 1, 6, 2]
            assert tuple(token for piece in own for token in piece.token_ids) == completion.token_ids
            assert "".join(piece.text or "" for piece in own) == completion.text == TEXT
            assert own[-1].spans == completion.spans and [piece.finish_reason for piece in own] == [None] * 4 + ["stop"]
        assert (whole.prompt_token_ids, whole.replica_id, whole.attempts) == (ids("hi"), "r1", 1)

    async def test_errors_of_the_service_are_raised(self, client, telling):
        telling.error = NonFiniteLogprob("broken weights", {"position": 3})
        async with client:
            with pytest.raises(InvalidRequest, match="outside the vocabulary"):
                await client.generate_stream([9999]).open()
            with pytest.raises(NonFiniteLogprob, match="broken weights"):
                async with client.generate_stream([5]) as stream:
                    assert [piece.token_ids async for piece in stream] == []
            with pytest.raises(InvalidRequest, match="temperature"):
                client.generate_stream([5], temperature=-1.0)


async def test_who_goes_away_ends_the_work(chatting, telling):
    telling.replies = False
    body = json.dumps({"prompt": [[5], [6]], "max_tokens": 13, "stream": True}).encode()
    await call_and_leave(with_engine(chatting, telling), "POST", "/v1/completions", body, at="http.response.body")
    assert len(telling.calls) == telling.cancelled == 2


class RemoteSessions(SessionStore):
    """Sessions of another process: a call to them takes a while."""

    ended = 0

    async def end_turn(self, session_id: str) -> None:
        await asyncio.sleep(0)
        await super().end_turn(session_id)
        self.ended += 1


@pytest.mark.parametrize("at", ["http.response.start", "http.response.body"])
async def test_who_leaves_a_stream_lets_its_session_expire(chatting, telling, at):
    telling.replies, sessions = False, RemoteSessions()
    name = await sessions.open(OpenSession())
    services = replace(with_engine(chatting, telling), sessions=sessions)
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    await call_and_leave(services, "POST", f"/v1/sessions/{name}/v1/chat/completions", body, at)
    assert len(telling.calls) == sessions.ended == 1
