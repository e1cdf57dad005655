"""A gateway listens at the proxy's port while the proxy does not answer, and only then."""

import asyncio
import fcntl
import signal
import socket
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
import uvicorn
import uvloop
from ray.serve.config import HTTPOptions
from starlette.requests import Request
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
async def standby(port: int, app: ASGIApp | None = None, host: str = "127.0.0.1") -> AsyncIterator[Standby]:
    """A gateway's standby that looks all the time, until the block ends."""

    async def here() -> HTTPOptions:
        return HTTPOptions(host=host, port=port)

    made = Standby(app or says("gateway"), here, lambda _: asyncio.sleep(0.01))
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
    async with standby(port):
        async with proxy(port):
            await until("proxy", lambda: answer(port))
        await until("gateway", lambda: answer(port))
        assert await answer(port, "/-/healthz") == "success"
        async with proxy(port):
            await until("proxy", lambda: answer(port))
        await until("gateway", lambda: answer(port))


async def test_a_request_whose_client_leaves_is_cancelled(port):
    came, left = asyncio.Event(), asyncio.Event()

    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        came.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async with asyncio.timeout(LONG_S), standby(port, never):
        async with proxy(port):
            await until("proxy", lambda: answer(port))
        _, writer = await connected(port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: 2\r\n\r\n{}")
        await came.wait()
        assert not left.is_set()
        writer.close()
        await left.wait()


async def test_a_long_body_arrives_whole_and_what_follows_the_reply_is_not_cancelled(port):
    said: asyncio.Queue[str] = asyncio.Queue()

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(await Request(scope, receive).body())(scope, receive, send)
        if scope["method"] == "POST":
            await said.put((await receive())["type"])

    async with asyncio.timeout(LONG_S), standby(port, echo):
        async with proxy(port):
            await until("proxy", lambda: answer(port))
        await until("", lambda: answer(port))
        async with httpx.AsyncClient(trust_env=False, timeout=LONG_S) as http:
            body = "0123456789" * 1_000_000
            assert (await http.post(f"http://127.0.0.1:{port}/v1/completions", content=body)).text == body
        assert await said.get() == "http.disconnect"


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect as soon as something listens at the port."""
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_gateway_that_gives_way_answers_every_connection(port, loop, turns):
    """However far it has come with them, in both event loops that Ray's actors may have."""

    async def give_way() -> None:
        async with standby(port) as ending:
            async with proxy(port):
                await until("proxy", lambda: answer(port))
            await until("gateway", lambda: answer(port))
            asked = [asked_without_the_loop(port) for _ in range(50)]
            for _ in range(turns):
                await asyncio.sleep(0)
            ending.close()
            for connection in asked:
                reader, writer = await asyncio.open_connection(sock=connection)
                said = await reader.read()  # until the gateway closes the connection, which it does not keep
                assert said.startswith(b"HTTP/1.1 200") and said.endswith(b"gateway"), said
                writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(give_way())


def asked_without_the_loop(port: int) -> socket.socket:
    """Send a request on a new connection; the kernel of the other side has it when this returns."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: gateway\r\n\r\n")
    while int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), "little"):
        pass
    return connection


async def test_a_node_that_never_had_a_proxy_gets_no_standby(port):
    async with standby(port):
        await until("nobody", lambda: answer(port))


async def test_a_gateway_that_ends_listens_no_more(port):
    async with standby(port, host="0.0.0.0") as ending:
        async with proxy(port):
            await until("proxy", lambda: answer(port))
        await until("gateway", lambda: answer(port))
        ending.close()
        await until("nobody", lambda: answer(port))
