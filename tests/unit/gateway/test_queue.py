"""Requests of every data route wait in one queue, and leave it with their callers."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rollout_service.config.engine import EngineConfig
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.fleet.progress import ProgressAsk
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from rollout_service.gateway.graceful_shutdown import OpenRequests
from rollout_service.protocol.progress import ProgressReply
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.sampling import GenerateCall
from tests.unit.gateway.chats import HELLO, URL, ScriptedEngine

ROUTES: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
    "/v1/completions": {"prompt": [[5], [6]], "max_tokens": 2},
    "/generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}
STREAMED = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions")
REQUESTS = [*ROUTES.items(), *((route, ROUTES[route] | {"stream": True}) for route in STREAMED)]


class BusyEngine:
    """An engine that answers nothing until a test lets it."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine, self.let, self.asked = engine, asyncio.Event(), asyncio.Event()

    async def generate(self, call: GenerateCall) -> Rollout:
        self.asked.set()
        await self.let.wait()
        return await self._engine.generate(call)

    async def progress(self, ask: ProgressAsk) -> ProgressReply:
        raise AssertionError("no router has told where a call is")


class Gateway:
    """A gateway whose only replica is full, and the requests that wait in it."""

    def __init__(self, chatting: Services, scripted: ScriptedEngine) -> None:
        self.engine = BusyEngine(scripted)
        self.dispatcher = Dispatcher(self.engine, None, EngineConfig(admission_limit=1))
        self.services = replace(chatting, dispatcher=self.dispatcher)
        self.open = OpenRequests()
        app = create_app(self.services)
        app.add_middleware(self.open.middleware)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=URL, timeout=None)

    async def send(self, route: str, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
        """Send a request, and return once it waits."""
        before = self.dispatcher.queue.sequences
        task = asyncio.create_task(self.http.post(route, json=body))
        while self.dispatcher.queue.sequences <= before and not task.done():
            await asyncio.sleep(0)
        return task

    async def full(self) -> asyncio.Task[httpx.Response]:
        """Fill the replica."""
        task = asyncio.create_task(self.http.post("/v1/completions", json={"prompt": [7], "max_tokens": 2}))
        await self.engine.asked.wait()
        return task


@pytest.fixture
def gateway(chatting: Services, scripted: ScriptedEngine) -> Gateway:
    return Gateway(chatting, scripted)


async def test_requests_of_every_route_wait_and_are_answered(gateway):
    replies = [await gateway.full(), *[await gateway.send(route, body) for route, body in REQUESTS]]
    assert not any(reply.done() for reply in replies)
    gateway.engine.let.set()
    for reply in replies:
        assert (await reply).status_code == 200


@pytest.mark.parametrize(("route", "body"), REQUESTS, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_request_whose_caller_leaves_leaves_the_queue(gateway, route, body):
    running, waiting = await gateway.full(), await gateway.send(route, body)
    waiting.cancel()
    await asyncio.wait([waiting])
    while gateway.dispatcher.queue.sequences:
        await asyncio.sleep(0)
    running.cancel()


async def test_a_gateway_that_ends_answers_what_waits(gateway):
    replies = [await gateway.full(), *[await gateway.send(route, body) for route, body in REQUESTS]]
    gateway.open.refuse()
    for reply in replies:
        answer = await reply
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "NotReady"
    assert gateway.dispatcher.queue.sequences == 0
