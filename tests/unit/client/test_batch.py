"""Batches of which the first groups are wanted: what there is of the rest is handed back, and carried on."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from rollout_service.client import BatchFailed, PartialRollout, RolloutClient, SyncRolloutClient
from rollout_service.errors import EngineFailed, InvalidRequest, RolloutServiceError, TooEarly
from rollout_service.protocol.rollout import Completion, FinishReason, Rollout, Span

URL = "http://service"
Body = dict[str, Any]
Step = Body | RolloutServiceError | Exception | asyncio.Event
"""An event of a stream, an error in its place, a connection that breaks, or what it waits for."""


def choice(index: int, start: int, *tokens: int, end: str | None = None, version: int = 3) -> Body:
    """An event: more of one completion."""
    spans = [(0 if end else start, start + len(tokens))] if tokens else []
    return {
        "choices": [
            {
                "index": index,
                "token_ids": tokens,
                "logprobs": [-t / 10 for t in tokens],
                "finish_reason": end,
                "weight_versions": [
                    {"version": str(version), "start": a, "end": b, "replica_id": "a"} for a, b in spans
                ],
            }
        ]
    }


LAST: Body = {"choices": [], "replica_id": "a", "attempts": 1, "truncated_sampling": False}


class Scripted(httpx.AsyncBaseTransport):
    """In the network's place: what is read of each stream is known, and who goes away from it."""

    def __init__(self, script: Callable[[Body], list[Step]]) -> None:
        self._script = script
        self.bodies: list[Body] = []
        self.gone = 0
        """Streams that were left before their end."""
        self.at_rest = 0
        """Streams of which all was read, but that go on."""
        self.three_rest = asyncio.Event()
        """Is set when so many are."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        return httpx.Response(200, stream=_Stream(self._events(body)), request=request)

    async def _events(self, body: Body) -> AsyncIterator[bytes]:
        try:
            for step in self._script(body):
                if isinstance(step, asyncio.Event):
                    self.at_rest += 1
                    if self.at_rest == 3:
                        self.three_rest.set()
                    await step.wait()
                elif isinstance(step, RolloutServiceError):
                    yield _line(step.to_wire())
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield _line({"request_id": body.get("request_id", "made-up")} | step)
        except (asyncio.CancelledError, GeneratorExit):
            self.gone += 1
            raise
        yield b"data: [DONE]\n\n"


class _Stream(httpx.AsyncByteStream):
    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for event in self._events:
            yield event

    async def aclose(self) -> None:
        await self._events.aclose()


def _line(event: object) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()


def one_of_three(scripted: "Scripted", body: Body) -> list[Step]:
    """Prompt [1] is complete when the others rest. Of those one completion has ended, and the other goes on."""
    if body.get("partial_token_ids") == [7, 8]:
        return [choice(0, 0, 9, version=4), choice(0, 1, 5, end="length", version=4), LAST]
    if body["token_ids"] == [1]:
        return [scripted.three_rest, choice(0, 0, 6, end="stop"), choice(1, 0, 6, end="stop"), LAST]
    return [choice(1, 0, 7), choice(0, 0, 6, end="stop"), choice(1, 1, 8), asyncio.Event()]


@pytest.fixture
async def scripted() -> Scripted:
    transport = Scripted(lambda body: one_of_three(transport, body))
    return transport


async def test_the_first_groups_come_back_and_the_rest_is_carried_on(scripted):
    told = list[tuple[int, int]]()
    async with RolloutClient(URL, transport=scripted) as client:
        first = await client.generate_batch(
            [[2], [1], [3]], until=1, n=2, max_tokens=4, progress=lambda *so_far: told.append(so_far)
        )
        assert (list(first.rollouts), list(first.partial), told, scripted.gone) == ([1], [0, 2], [(1, 1)], 2)
        for partial in first.partial.values():
            ended, cut = partial.completions
            assert (ended.finish_reason, ended.token_ids) == ("stop", (6,))
            assert (cut.finish_reason, cut.token_ids, cut.logprobs) == ("abort", (7, 8), (-0.7, -0.8))
            assert cut.spans == (Span(version=3, start=0, end=2, replica_id="a"),)
            assert (partial.num_tokens, partial.attempts) == (3, 1)
        again = [PartialRollout.model_validate_json(each.model_dump_json()) for each in first.partial.values()]
        scripted.bodies.clear()
        second = await client.generate_batch([*again, [1]], until=3, n=2, max_tokens=4, seed=5)
    assert not second.partial and list(second.rollouts) == [0, 1, 2]
    rollout = second.rollouts[0]
    ended, whole = rollout.completions
    assert ended.token_ids == (6,) and whole.token_ids == (7, 8, 9, 5)
    assert whole.logprobs == (-0.7, -0.8, -0.9, -0.5) and (whole.index, whole.finish_reason) == (1, "length")
    assert [(s.version, s.start, s.end) for s in whole.spans] == [(3, 0, 2), (4, 2, 4)]
    assert (rollout.attempts, rollout.prompt_token_ids, rollout.request_id) == (2, (2,), again[0].request_id)
    rests = [body for body in scripted.bodies if "partial_token_ids" in body]
    assert [body["token_ids"] for body in rests] == [[2], [3]]
    assert all(body["sampling_params"] == {"max_tokens": 4, "seed": 6, "logprobs": 0} for body in rests)


async def test_what_waited_for_its_turn_comes_back_untouched(scripted):
    scripted.three_rest.set()
    async with RolloutClient(URL, transport=scripted) as client:
        first = await client.generate_batch([[1], [2], [3]], until=1, n=2, concurrency=1)
    assert list(first.rollouts) == [0] and len(scripted.bodies) == 1 + scripted.gone
    assert first.partial[2].completions == () and first.partial[2].prompt_token_ids == (3,)


async def test_groups_that_were_complete_already_come_back_at_once(scripted):
    complete = PartialRollout.of(Rollout(request_id="r", prompt_token_ids=(9,), completions=(made(6),), replica_id="a"))
    async with RolloutClient(URL, transport=scripted) as client:
        batch = await client.generate_batch([[2], complete, complete], until=1)
    assert list(batch.rollouts) == [1] and batch.rollouts[1].completions == complete.completions
    assert batch.partial[2] == complete and not scripted.bodies


def made(*tokens: int, end: FinishReason = "stop") -> Completion:
    spans = (Span(version=3, start=0, end=len(tokens), replica_id="a"),) if tokens else ()
    return Completion(index=0, token_ids=tokens, logprobs=(-1.0,) * len(tokens), finish_reason=end, spans=spans)


def begun() -> PartialRollout:
    """A completion of two tokens, unfinished."""
    return PartialRollout(request_id="r", prompt_token_ids=(1,), completions=(made(6, 7, end="abort"),))


async def test_text_begins_anew_with_that_of_the_tokens_before():
    def script(body: Body) -> list[Step]:
        ids, text = {"prompt_token_ids": [1, 2]}, {"text": "abc" if "partial_token_ids" in body else "ab"}
        event = choice(0, 0, 8, end="stop") if "partial_token_ids" in body else choice(0, 0, 7)
        event["choices"][0] |= text
        return [event | ids, LAST] if "partial_token_ids" in body else [event | ids, httpx.ReadError("broken")]

    scripted = Scripted(script)
    async with RolloutClient(URL, transport=scripted) as client:
        batch = await client.generate_batch(["12"], until=1, max_tokens=9)
    [completion] = batch.rollouts[0].completions
    assert (completion.token_ids, completion.text, batch.rollouts[0].attempts) == ((7, 8), "abc", 2)
    whole, rest = scripted.bodies
    assert whole["prompt"] == "12" and (rest["token_ids"], rest["partial_token_ids"]) == ([1, 2], [7])
    assert rest["output_mode"] == "text"


@pytest.mark.parametrize("end", [httpx.ReadError("broken"), EngineFailed("every attempt lost its replica")], ids=repr)
async def test_a_connection_that_keeps_breaking_and_other_errors_are_raised(end):
    scripted = Scripted(lambda body: [choice(0, 0, 7), end])
    async with RolloutClient(URL, transport=scripted, retries=2) as client:
        with pytest.raises(type(end)):
            await client.generate_batch([[1], [2]], until=1, max_tokens=9)
    assert max(len(body.get("partial_token_ids", ())) for body in scripted.bodies) == (
        2 if isinstance(end, httpx.ReadError) else 0
    )


async def test_until_hands_back_all_but_the_bad_prompt():
    def script(body: Body) -> list[Step]:
        if body["token_ids"] == [2]:
            return [InvalidRequest("token id 2 is bad")]
        return [choice(0, 0, 7, end="stop" if body["token_ids"] == [1] else "abort"), LAST]

    async with RolloutClient(URL, transport=Scripted(script)) as client:
        with pytest.raises(BatchFailed, match="prompt 1 of 3, counted from 0: token id 2 is bad") as failed:
            await client.generate_batch([[1], [2], [3]], until=3, max_tokens=9, on_abort="return")
    assert list(failed.value.rollouts) == [0] and list(failed.value.errors) == [1]
    assert {index: each.num_tokens for index, each in failed.value.partial.items()} == {2: 1}


async def test_one_that_was_cut_short_for_good_is_handed_back():
    scripted = Scripted(lambda body: [choice(0, 0, 7, end="abort"), LAST])
    async with RolloutClient(URL, transport=scripted) as client:
        batch = await client.generate_batch([[1], [2]], until=1, on_abort="return")
        assert not batch.rollouts and [each.num_tokens for each in batch.partial.values()] == [1, 1]
        [rollout] = await client.generate_batch([batch.partial[0]], on_abort="return")
    assert rollout.completions[0].token_ids == (7, 7) and rollout.completions[0].finish_reason == "abort"


async def test_what_cannot_be_carried_on_is_refused_by_name_before_anything_is_sent(scripted):
    async with RolloutClient(URL, transport=scripted) as client:
        for wrong in ({"return_routed_experts": True}, {"routed_experts_prompt_start": 1}):
            with pytest.raises(InvalidRequest, match="routed_experts"):
                await client.generate_batch([[1]], until=1, **wrong)
        with pytest.raises(InvalidRequest, match=r"completion 0 of r has 2 tokens already, and max_tokens=2"):
            await client.generate_batch([[1], begun()], until=1, max_tokens=2)
        for until in (0, 3):
            with pytest.raises(ValueError, match=f"until={until} groups of 2 prompts"):
                await client.generate_batch([[1], [2]], until=until)
    assert not scripted.bodies


@pytest.mark.parametrize("until", [None, 2])
@pytest.mark.parametrize(
    ("bad", "why"), [([1.5], "integer token ids"), ("a\ud800", "half a surrogate pair at character 1")]
)
async def test_a_prompt_that_cannot_be_sent_is_named(bad, why, until):
    scripted = Scripted(lambda body: [choice(0, 0, 7, end="stop"), LAST])
    async with RolloutClient(URL, transport=scripted) as client:
        with pytest.raises(BatchFailed, match=f"prompt 1 of 2, counted from 0: .*{why}") as failed:
            await client.generate_batch([PartialRollout(request_id="r", prompt_token_ids=(1,)), bad], until=until)
    assert isinstance(failed.value, InvalidRequest) and list(failed.value.errors) == [1]


@pytest.mark.parametrize(("asked", "wanted"), [(None, 3), (1, 3), (5, 5), ("step-2", "step-2")])
async def test_a_rest_asks_for_weights_no_older_than_its_own(asked, wanted):
    scripted = Scripted(lambda body: [choice(0, 0, 8, end="stop"), LAST])
    async with RolloutClient(URL, transport=scripted) as client:
        await client.generate_batch([begun()], min_weight_version=asked)
    assert [body["min_weight_version"] for body in scripted.bodies] == [wanted]


@pytest.mark.parametrize("asked", [3, "golden"])
async def test_rest_of_an_exact_version_keeps_its_number(asked):
    scripted = Scripted(lambda body: [choice(0, 0, 8, end="stop"), LAST])
    async with RolloutClient(URL, transport=scripted) as client:
        await client.generate_batch([begun()], weight_version={"exact_version": asked})
        with pytest.raises(InvalidRequest, match="has tokens of version 3, and exact_version=4 would continue it"):
            await client.generate_batch([begun()], weight_version={"exact_version": 4})
        await client.generate_batch([begun()], weight_version={"min_version": 5})
    exact, least = scripted.bodies
    assert (exact["weight_version"], least["min_weight_version"]) == ({"exact_version": 3}, 5)


async def test_a_rest_goes_on_in_a_service_without_its_version():
    def script(body: Body) -> list[Step]:
        if "min_weight_version" in body:
            return [TooEarly("no replica serves it", {"latest_version": 0})]
        return [choice(0, 0, 8, end="stop", version=0), LAST]

    async with RolloutClient(URL, transport=Scripted(script)) as client:
        [rollout] = await client.generate_batch([begun()])
    assert rollout.completions[0].versions == (3, 0)


def test_the_blocking_client_does_the_same():
    def script(body: Body) -> list[Step]:
        return [choice(0, 0, 6, end="stop"), LAST]

    with SyncRolloutClient(URL, transport=Scripted(script)) as client:
        batch = client.generate_batch([[1], [2]], until=2)
        assert [r.completions[0].token_ids for r in batch.rollouts.values()] == [(6,), (6,)]
        with client.generate_stream([1]) as stream:
            assert [piece.token_ids for piece in stream] == [(6,)]
        assert stream.rollout.completions[0].token_ids == (6,)
        assert [each.token_ids for each in stream.partial.completions] == [(6,)]


async def test_a_stream_that_is_left_early_hands_back_what_was_read(scripted):
    async with RolloutClient(URL, transport=scripted) as client:
        async with client.generate_stream([2], n=2, max_tokens=4) as stream:
            assert stream.partial.completions == ()
            for _ in range(3):
                await anext(stream)
        assert [c.token_ids for c in stream.partial.completions] == [(6,), (7, 8)]
        [rollout] = await client.generate_batch([stream.partial], max_tokens=4)
        assert [c.token_ids for c in rollout.completions] == [(6,), (7, 8, 9, 5)]
        scripted.three_rest.set()
        async with client.generate_stream([1], n=2) as stream:
            assert [piece.token_ids async for piece in stream] == [(6,), (6,)]
            assert await stream.next() is None and [piece async for piece in stream] == []


async def test_a_stream_has_the_likeliest_tokens_of_all_pieces():
    likeliest = [[[7, -0.7, 1], [8, -2.0, 2]], [[9, -0.9, 1], [8, -2.0, 2]]]
    pieces = [choice(0, 0, 7), choice(0, 1, 9), choice(0, 2, end="stop")]
    for piece, row in zip(pieces, [*likeliest, []], strict=True):
        piece["choices"][0]["top_logprobs"] = [row] if row else []
    pieces[-1]["choices"][0]["weight_versions"] = [{"version": "3", "start": 0, "end": 2}]
    async with RolloutClient(URL, transport=Scripted(lambda _: [*pieces, LAST])) as client:
        batch = await client.generate_batch([[1]], until=1, logprobs=2)
        [completion] = batch.rollouts[0].completions
    assert [[list(each) for each in row] for row in completion.top_logprobs or ()] == likeliest


async def test_a_newer_service_may_stream_more_fields():
    piece = choice(0, 0, 7, end="stop")
    piece["choices"][0]["new_field"] = piece["new_field"] = 1
    scripted = Scripted(lambda _: [piece, LAST])
    async with RolloutClient(URL, transport=scripted) as client, client.generate_stream([1]) as stream:
        assert [piece.token_ids async for piece in stream] == [(7,)]


async def test_a_rest_that_breaks_after_its_last_token_has_ended():
    def script(body: Body) -> list[Step]:
        start = len(body.get("partial_token_ids", ()))
        return [choice(0, 0, *range(start + 1, 5 if start else 3)), httpx.ReadError("gone")]

    transport = Scripted(script)
    async with RolloutClient(URL, transport=transport) as client:
        batch = await client.generate_batch([[1]], until=1, max_tokens=4)
    [completion] = batch.rollouts[0].completions
    assert (completion.token_ids, completion.finish_reason) == ((1, 2, 3, 4), "length")
    assert [body.get("partial_token_ids") for body in transport.bodies] == [None, [1, 2]]


async def test_a_stream_that_breaks_before_its_last_event_names_its_replica():
    def script(_: Body) -> list[Step]:
        return [choice(0, 0, 7, end="stop"), httpx.ReadError("gone")]

    async with RolloutClient(URL, transport=Scripted(script)) as client:
        batch = await client.generate_batch([[1]], until=1)
    assert batch.rollouts[0].replica_id == "a"


@pytest.mark.parametrize("index", [1, -1])
async def test_a_completion_that_was_not_asked_for_is_an_error(index):
    scripted = Scripted(lambda _: [choice(index, 0, 7)])
    async with RolloutClient(URL, transport=scripted) as client, client.generate_stream([1]) as stream:
        with pytest.raises(RolloutServiceError, match=f"completion {index} came for n=1"):
            await anext(stream)
