import asyncio
import pickle
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_service.client import BatchFailed, RolloutClient
from rollout_service.errors import (
    ContextTooLong,
    InvalidRequest,
    NotReady,
    Overloaded,
    RolloutServiceError,
    TooEarly,
    Unauthorized,
)
from rollout_service.protocol.rollout import Span
from tests.unit.client.conftest import cancelled
from tests.unit.client.service import Crowd, generate_reply, until_disconnected, until_gone

GENERATE = ("POST", "/inference/v1/generate")


class TestRequest:
    async def test_a_rollout_carries_tokens_logprobs_spans_and_replica(self, service, client):
        rollout = await client.generate([1, 2], n=2, request_id="mine")

        assert (rollout.request_id, rollout.replica_id, rollout.prompt_token_ids) == ("mine", "replica-1", (1, 2))
        assert [completion.index for completion in rollout.completions] == [0, 1]
        first = rollout.completions[0]
        assert (first.token_ids, first.logprobs) == ((7, 8, 9), (-0.7, -0.8, -0.9))
        assert first.spans == (Span(version=3, start=0, end=2), Span(version=4, start=2, end=3))
        assert (first.finish_reason, first.stop_reason, first.text) == ("length", None, None)
        assert rollout.attempts == 2

    async def test_only_what_differs_from_the_defaults_is_sent(self, service, client):
        sampling: dict[str, Any] = {
            "n": 2,
            "max_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "min_p": 0.1,
            "seed": 6,
            "stop": ["x"],
            "stop_token_ids": [3],
            "ignore_eos": True,
            "min_tokens": 1,
            "logprobs": 3,
        }
        about: dict[str, Any] = {"min_weight_version": 7, "session_id": "s", "priority": -1}
        about |= {"on_abort": "return", "request_id": "r"}
        await client.generate([1, 2])
        await client.generate([1], **sampling, **about)
        rollout = await client.generate("hi")
        default = {"sampling_params": {"logprobs": 0}, "flat_logprobs": True}
        assert service.bodies == [
            {"token_ids": [1, 2], **default},
            {"token_ids": [1], "sampling_params": sampling, "flat_logprobs": True, **about},
            {"prompt": "hi", "output_mode": "text", **default},
        ]
        assert (rollout.prompt_token_ids, rollout.completions[0].text) == ((104, 105), "789")

    @pytest.mark.parametrize(
        "prompt", [torch.tensor([5, 6]), np.array([5, 6]), (5, 6)], ids=["tensor", "array", "tuple"]
    )
    async def test_a_prompt_may_be_an_array_or_a_tensor(self, service, client, prompt):
        assert (await client.generate(prompt)).prompt_token_ids == (5, 6)
        assert service.bodies[0]["token_ids"] == [5, 6]

    async def test_what_is_no_prompt_or_parameter_is_refused_before_it_is_sent(self, service, client):
        for prompt in ([1.5], [[1, 2]], 7, ["text"]):
            with pytest.raises(InvalidRequest, match="flat sequence of integer token ids"):
                await client.generate(prompt)
        for name, wrong in {"temperature": float("nan"), "n": 0, "stop": [1], "stop_token_ids": ["x"]}.items():
            with pytest.raises(InvalidRequest, match=name):
                await client.generate([1], **{name: wrong})
        for name, wrong in {"priority": "high", "min_weight_version": -1}.items():
            with pytest.raises(InvalidRequest, match=f"options of the request refused: {name}={wrong!r}: "):
                await client.generate([1], **{name: wrong})
        with pytest.raises(InvalidRequest, match="ScoreRequest is refused: start: "):
            await client.score([1, 2], start=0)
        assert service.log == []


class TestFailures:
    async def test_final_errors_are_raised_as_their_class_and_refusals_are_tried_again(self, service, client):
        for count, error in enumerate((TooEarly("not yet"), InvalidRequest("too long", {"max": 8})), start=1):
            service.answers[GENERATE].append(error)
            with pytest.raises(type(error)) as caught:
                await client.generate([1])
            assert (caught.value.message, caught.value.detail) == (error.message, error.detail)
            assert service.calls(*GENERATE) == count
        service.answers[GENERATE] += [Overloaded("full"), NotReady("starting")]
        assert (await client.generate([1])).prompt_token_ids == (1,)
        assert service.calls(*GENERATE) == 5

    async def test_rollout_retries_on_broken_connections_are_bounded(self):
        requests = 0

        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal requests
            await reader.readuntil(b"\r\n\r\n")
            requests += 1
            writer.transport.abort()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, RolloutClient(f"http://127.0.0.1:{port}", retries=1) as client:
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)) as caught:
                await client.generate([1])
            assert requests == 2
            assert "kept failing" in str(caught.value)
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)) as caught:
                await client.pause()
            assert requests == 3
            assert "may have accepted" in str(caught.value)

    async def test_a_rollout_without_an_answer_in_time_is_not_repeated_and_says_so(self):
        requests = list[httpx.Request]()

        def time_out(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            raise httpx.ReadTimeout("", request=request)

        transport = httpx.MockTransport(time_out)
        async with RolloutClient("http://service", timeout_s=1, transport=transport) as client:
            with pytest.raises(httpx.ReadTimeout) as caught:
                await client.generate([1])
        assert len(requests) == 1
        assert "no answer in time. It was not repeated" in str(caught.value)

    async def test_the_error_says_where_nothing_is_listening(self):
        async with RolloutClient("http://127.0.0.1:9", retries=0) as client:
            with pytest.raises(httpx.ConnectError) as caught:
                await client.generate([1])
        why = "http://127.0.0.1:9: no connection (All connection attempts failed). Is the service running"
        assert why in str(caught.value)

    async def test_cancelling_a_generation_closes_its_connection(self, service, client):
        accepted, gone = asyncio.Event(), asyncio.Event()
        service.generate = until_gone(accepted, gone)
        generation = asyncio.create_task(client.generate([1]))
        await accepted.wait()
        await cancelled(generation)
        await gone.wait()
        assert service.calls(*GENERATE) == 1

    @pytest.mark.parametrize(
        ("spoil", "complaint"),
        [
            (lambda reply: reply.pop("replica_id"), "cannot read"),
            (lambda reply: reply["choices"][0].pop("logprobs"), "cannot read"),
            (lambda reply: reply["choices"].append(reply["choices"][0]), "does not answer the request"),
            (lambda reply: reply["choices"][0]["token_ids"].pop(), "2 tokens but 3 logprobs"),
            (lambda reply: reply["choices"][0]["weight_versions"].pop(), "do not cover 3 tokens"),
            (lambda reply: reply["choices"][0]["logprobs"].__setitem__(0, None), "cannot read"),
        ],
        ids=["no replica", "no logprobs", "two choices", "a token short", "a span short", "a logprob missing"],
    )
    async def test_a_reply_that_does_not_fit_together_is_an_error(self, service, client, spoil, complaint):
        async def spoilt(request: Request) -> Response:
            reply = generate_reply(await request.json())
            spoil(reply)
            return JSONResponse(reply)

        service.generate = spoilt
        with pytest.raises(RolloutServiceError, match=complaint):
            await client.generate([1])

    async def test_a_newer_service_may_reply_with_more_fields(self, service, client, tensors):
        rollout = await client.generate([1], n=2)
        service.is_newer = True
        assert await client.generate([1], n=2, request_id=rollout.request_id) == rollout
        status = await client.push_weights(5, tensors)
        assert (status.version, status.state) == (5, "live")
        assert [each.version for each in await client.weights()] == [5]


class TestBatch:
    async def test_a_batch_keeps_the_order_of_its_prompts(self, service, client):
        third_arrived = asyncio.Event()

        async def last_first(request: Request) -> Response:
            body = await request.json()
            if body["token_ids"] == [3]:
                third_arrived.set()
            await third_arrived.wait()
            return JSONResponse(generate_reply(body))

        service.generate = last_first
        steps: list[tuple[int, int]] = []
        rollouts = await client.generate_batch([[1], [2], [3]], n=2, progress=lambda done, of: steps.append((done, of)))
        assert [rollout.prompt_token_ids for rollout in rollouts] == [(1,), (2,), (3,)]
        assert all(len(rollout.completions) == 2 for rollout in rollouts)
        assert steps == [(1, 3), (2, 3), (3, 3)]

    @pytest.mark.parametrize(("concurrency", "max_connections"), [(2, 9), (9, 2), (None, 2)])
    async def test_a_batch_has_no_more_requests_under_way_than_allowed(self, service, concurrency, max_connections):
        crowd = Crowd(2)

        async def count(request: Request) -> Response:
            async with crowd:
                return JSONResponse(generate_reply(await request.json()))

        service.generate = count
        async with RolloutClient(service.url, max_connections=max_connections) as client:
            await client.generate_batch([[i] for i in range(8)], concurrency=concurrency)
        assert crowd.most == 2

    async def test_one_bad_prompt_does_not_lose_the_others(self, service, client):
        async def refuse_57(request: Request) -> Response:
            body = await request.json()
            if body["token_ids"] == [57]:
                raise ContextTooLong("the prompt has 9 tokens", {"prompt_tokens": 9})
            return JSONResponse(generate_reply(body))

        service.generate = refuse_57
        with pytest.raises(BatchFailed, match="prompt 57 of 121, counted from 0: the prompt has 9 tokens") as failed:
            await client.generate_batch([[i] for i in range(121)], concurrency=8)
        assert sorted(failed.value.rollouts) == [i for i in range(121) if i != 57]
        assert failed.value.rollouts[120].prompt_token_ids == (120,)
        assert isinstance(failed.value, ContextTooLong) and failed.value.detail == {"prompt_tokens": 9}
        [(index, error)] = failed.value.errors.items()
        assert index == 57 and type(error) is ContextTooLong
        assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)

    async def test_an_error_of_the_service_ends_the_batch(self, service):
        others_running, cancelled = asyncio.Event(), asyncio.Event()

        async def fail_the_second(request: Request) -> Response:
            body = await request.json()
            if body["token_ids"] == [1]:
                return JSONResponse(generate_reply(body))
            if body["token_ids"] == [2]:
                await others_running.wait()
                raise TooEarly("no replica serves 5")
            others_running.set()
            await until_disconnected(request)
            cancelled.set()
            return Response()

        service.generate = fail_the_second
        async with RolloutClient(service.url, retries=0) as client:
            with pytest.raises(TooEarly, match="prompt 1 of 3, counted from 0: no replica serves 5") as failed:
                await client.generate_batch([[1], [2], [3]], concurrency=2)
        await cancelled.wait()
        assert isinstance(failed.value, BatchFailed) and list(failed.value.rollouts) == [0]

    async def test_options_no_prompt_can_have_are_refused_once(self, service, client):
        with pytest.raises(InvalidRequest, match="n=0") as refused:
            await client.generate_batch([[1], [2]], n=0)
        assert not isinstance(refused.value, BatchFailed) and not service.bodies

    async def test_batches_of_nothing_and_what_is_no_batch(self, client):
        assert await client.generate_batch([]) == []
        with pytest.raises(TypeError, match="put it in a list"):
            await client.generate_batch("one text")
        with pytest.raises(ValueError, match="concurrency=0"):
            await client.generate_batch([[1]], concurrency=0)


class TestAddress:
    async def test_the_token_goes_with_every_request(self, service, client):
        service.token = "secret"
        with pytest.raises(Unauthorized):
            await client.generate([1])
        async with RolloutClient(service.url, token="secret") as with_token:
            await with_token.generate([1])
            assert await with_token.weights() == []

    def test_what_is_no_address_or_token_is_refused(self):
        for url in ("127.0.0.1:8000", "ftp://host", "", "http://", "http://[::1", "http://h:65536", "http://h:0"):
            with pytest.raises(ValueError, match="not the address of a service"):
                RolloutClient(url)
        for token in ("clé", "two words"):
            with pytest.raises(ValueError, match="the token is not one word of printable ASCII"):
                RolloutClient("http://service", token=token)

    async def test_a_service_below_a_path_is_reached(self):
        def at_prefix(request: httpx.Request) -> httpx.Response:
            assert request.url.path == "/rollouts/inference/v1/generate"
            return httpx.Response(200, json=generate_reply({"sampling_params": {}}))

        async with RolloutClient("http://service/rollouts/", transport=httpx.MockTransport(at_prefix)) as client:
            await client.generate([1])

    def test_a_client_of_another_event_loop_is_refused(self):
        ok = httpx.MockTransport(lambda _: httpx.Response(200))
        client = RolloutClient("http://service", transport=ok)
        asyncio.run(client.resume())
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(client.resume())
