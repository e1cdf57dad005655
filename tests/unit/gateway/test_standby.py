"""A gateway listens at the proxy's port while the proxy does not answer, and only then."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import httpx
import pytest
import uvicorn
import uvloop
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_service.gateway.standby import Standby
from rollout_service.local import free_port

LONG_S = 30.0


def says(text: str) -> ASGIApp:
    """Return an app that answers every request with ``text``."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(text)(scope, receive, send)

    return app


@asynccontextmanager
async def proxy(port: int) -> AsyncIterator[None]:
    """A server that shares its port, as Serve's proxy does."""
    server = uvicorn.Server(uvicorn.Config(says("proxy"), interface="asgi3", lifespan="off", log_config=None))
    listener = socket.create_server(("127.0.0.1", port), reuse_port=True)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def standby(options: HTTPOptions) -> AsyncIterator[Standby]:
    """A gateway's standby that looks all the time, until the block ends."""

    async def here() -> HTTPOptions:
        return options

    made = Standby(says("gateway"), here, lambda _: asyncio.sleep(0.01))
    watching = asyncio.create_task(made.watch())
    try:
        yield made
    finally:
        made.close()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Restore them: of two uvicorn servers, the one that ends last leaves the handlers of the other."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture
def port() -> int:
    return free_port()


async def answer(port: int, path: str = "/v1/models") -> str:
    """Return who answers a new connection; "nobody" if it is refused."""
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=LONG_S) as http:
        try:
            return (await http.get(f"http://127.0.0.1:{port}{path}")).text
        except httpx.TransportError:
            return "nobody"


async def until(wanted: str, ask: Callable[[], Awaitable[str]]) -> None:
    """Ask until the answer has been ``wanted`` twenty times in a row: the kernel chooses among several listeners."""
    in_a_row = 0
    async with asyncio.timeout(LONG_S):
        while in_a_row < 20:
            in_a_row = in_a_row + 1 if await ask() == wanted else 0
            await asyncio.sleep(0.01)


async def test_the_gateway_answers_while_the_proxy_is_away(port):
    async with standby(HTTPOptions(host="127.0.0.1", port=port)):
        async with proxy(port):
            await until("proxy", lambda: answer(port))
        await until("gateway", lambda: answer(port))
        assert await answer(port, "/-/healthz") == "success"
        async with proxy(port):
            await until("proxy", lambda: answer(port))
        await until("gateway", lambda: answer(port))


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_gateway_that_gives_way_loses_no_request(port, loop):
    """Neither on new connections nor on kept ones, in both event loops that Ray's actors may have."""
    url = f"http://127.0.0.1:{port}/v1/models"

    async def ask(http: httpx.AsyncClient, first: asyncio.Barrier, done: asyncio.Event) -> None:
        assert (await http.get(url)).text == "gateway"
        await first.wait()
        while not done.is_set():
            assert (await http.get(url)).text in ("gateway", "proxy")
        assert (await http.get(url)).text == "proxy"

    async def give_way() -> None:
        async with standby(HTTPOptions(host="127.0.0.1", port=port)), AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(httpx.AsyncClient(trust_env=False, limits=httpx.Limits(**limits)))
                for limits in ({}, {"max_keepalive_connections": 0})
            ]
            async with proxy(port):
                await until("proxy", lambda: answer(port))
            for _ in range(3):
                await until("gateway", lambda: answer(port))
                first, done = asyncio.Barrier(41), asyncio.Event()
                asking = asyncio.gather(*(ask(http, first, done) for http in clients for _ in range(20)))
                await first.wait()
                async with proxy(port):
                    await until("proxy", lambda: answer(port))
                    done.set()
                    await asking

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(give_way())


async def test_a_node_that_never_had_a_proxy_gets_no_standby(port):
    looks = 0

    async def looked(_: float) -> None:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0)

    async def here() -> HTTPOptions:
        return HTTPOptions(host="127.0.0.1", port=port)

    watching = asyncio.create_task(Standby(says("gateway"), here, looked).watch())
    async with asyncio.timeout(LONG_S):
        while looks < 5:
            await asyncio.sleep(0.01)
    assert await answer(port) == "nobody"
    watching.cancel()


async def test_a_gateway_that_ends_listens_no_more(port):
    async with standby(HTTPOptions(host="0.0.0.0", port=port)) as ending:
        async with proxy(port):
            await until("proxy", lambda: answer(port))
        await until("gateway", lambda: answer(port))
        ending.close()
        await until("nobody", lambda: answer(port))
