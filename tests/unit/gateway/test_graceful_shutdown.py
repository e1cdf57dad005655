"""A gateway that must end answers what is still open."""

import asyncio
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from rollout_service.gateway.graceful_shutdown import OpenRequests, Removal
from rollout_service.web.errors import install_error_handlers

LONG_S = 30.0


class Gateway:
    """With a route that answers when it is let, and one that has begun to answer."""

    def __init__(self) -> None:
        self.open, self.asked, self.cancelled, self.let = OpenRequests(), asyncio.Event(), False, asyncio.Event()
        self.begun = asyncio.Event()
        app = FastAPI()
        install_error_handlers(app)
        app.get("/slow")(self.slow)
        app.get("/stream")(self.stream)
        app.add_middleware(self.open.middleware)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")

    async def slow(self) -> str:
        self.asked.set()
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return "answered"

    async def stream(self) -> StreamingResponse:
        async def parts():
            yield b"first"
            self.begun.set()
            await self.let.wait()
            yield b"second"

        return StreamingResponse(parts())


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
async def asking(gateway: Gateway) -> asyncio.Task[httpx.Response]:
    """A request that the gateway has begun to answer."""
    task = asyncio.create_task(gateway.http.get("/slow"))
    await asyncio.wait_for(gateway.asked.wait(), LONG_S)
    return task


async def test_open_requests_are_cancelled_with_503_and_retry_after(gateway, asking):
    gateway.open.refuse()
    answer = await asyncio.wait_for(asking, LONG_S)
    assert answer.status_code == 503 and "Retry-After" in answer.headers
    assert answer.json()["error"]["type"] == "NotReady"
    assert "this gateway ends before GET /slow was answered: send it again" in answer.json()["error"]["message"]
    assert gateway.cancelled


async def test_answered_and_later_requests_are_not_refused(gateway):
    gateway.let.set()
    assert (await gateway.http.get("/slow")).json() == "answered"
    gateway.open.refuse()
    assert (await gateway.http.get("/slow")).json() == "answered"


async def test_a_caller_that_goes_away_by_itself_is_cancelled_as_ever(gateway, asking):
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() and gateway.cancelled


async def test_an_answer_that_has_begun_is_not_mixed_with_another_one(gateway):
    asking = asyncio.create_task(gateway.http.get("/stream"))
    await asyncio.wait_for(gateway.begun.wait(), LONG_S)
    gateway.open.refuse()
    await asyncio.wait([asking])
    assert asking.cancelled()


async def test_an_error_of_serve_in_a_body_is_a_disconnect(gateway):
    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(ClientDisconnect):
            await Request(scope, receive).body()
        gateway.begun.set()

    async def receive() -> Message:
        raise TaskCancelledError

    async def send(message: Message) -> None:
        raise AssertionError(message)

    await gateway.open.middleware(read)({"type": "http"}, receive, send)
    assert gateway.begun.is_set()


async def test_an_answer_that_says_503_is_not_cut_off_by_a_second_refusal(gateway, asking):
    gateway.open.refuse()
    gateway.open.refuse()
    assert (await asyncio.wait_for(asking, LONG_S)).status_code == 503


class End(Exception):
    """Of the test."""


class Watched:
    """A gateway with an open request, in a time of its own, which passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.answers, self.refused_at = 0.0, True, None
        self.any = True
        self.at: dict[float, Callable[[], None]] = {}
        """What happens in the first sleep that ends after this time."""
        self.removal = Removal(self, 20.0, self._answered, lambda: self.now, self._sleep)

    def refuse(self) -> None:
        self.refused_at = self.now
        raise End

    def controller(self, answers: bool) -> None:
        self.answers = answers

    async def until(self, end_s: float) -> float | None:
        """When what is open was refused; None: not before ``end_s``."""
        self.at[end_s] = self._end
        with pytest.raises(End):
            await self.removal.watch()
        return self.refused_at

    def _end(self) -> None:
        raise End

    async def _answered(self, within_s: float) -> bool:
        return self.answers

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [time for time in self.at if time <= self.now]:
            self.at.pop(due)()


async def test_a_gateway_that_serve_removed_refuses_in_time():
    watched = Watched()
    watched.at[4.0] = watched.removal.note_health_check  # for the last time
    assert await watched.until(60) == 25


async def test_a_gateway_that_is_asked_for_its_health_refuses_nothing():
    watched = Watched()
    watched.at = {float(second): watched.removal.note_health_check for second in range(100)}
    assert await watched.until(100) is None


async def test_without_a_controller_nobody_is_removed():
    watched = Watched()
    watched.at[5.0] = lambda: watched.controller(False)
    watched.at[60.0] = lambda: watched.controller(True)  # it has yet to find this gateway
    watched.at[75.0] = watched.removal.note_health_check
    watched.at[76.0] = watched.removal.note_health_check
    assert await watched.until(90) is None


async def test_a_request_that_comes_late_to_a_removed_gateway_is_refused():
    watched = Watched()
    watched.any = False
    watched.at[40.0] = lambda: setattr(watched, "any", True)
    assert await watched.until(60) == 40
