"""A gateway that must end answers what is still open."""

import asyncio

import httpx
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from rollout_service.gateway.overdue import OpenRequests
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
        async def parts():  # type: ignore[no-untyped-def]
            yield b"first"
            self.begun.set()
            await self.let.wait()
            yield b"second"

        return StreamingResponse(parts())


async def test_open_requests_are_cancelled_with_503_and_retry_after() -> None:
    gateway = Gateway()
    asking = asyncio.create_task(gateway.http.get("/slow"))
    await asyncio.wait_for(gateway.asked.wait(), LONG_S)
    gateway.open.refuse()
    answer = await asyncio.wait_for(asking, LONG_S)
    assert answer.status_code == 503 and "Retry-After" in answer.headers
    assert answer.json()["error"]["type"] == "NotReady"
    assert "this gateway ends before GET /slow was answered: send it again" in answer.json()["error"]["message"]
    assert gateway.cancelled


async def test_answered_and_later_requests_are_not_refused() -> None:
    gateway = Gateway()
    gateway.let.set()
    assert (await gateway.http.get("/slow")).json() == "answered"
    gateway.open.refuse()
    assert (await gateway.http.get("/slow")).json() == "answered"


async def test_a_caller_that_goes_away_by_itself_is_cancelled_as_ever() -> None:
    gateway = Gateway()
    asking = asyncio.create_task(gateway.http.get("/slow"))
    await asyncio.wait_for(gateway.asked.wait(), LONG_S)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() and gateway.cancelled


async def test_an_answer_that_has_begun_is_not_mixed_with_another_one() -> None:
    gateway = Gateway()
    asking = asyncio.create_task(gateway.http.get("/stream"))
    await asyncio.wait_for(gateway.begun.wait(), LONG_S)
    gateway.open.refuse()
    await asyncio.wait([asking])
    assert asking.cancelled()
