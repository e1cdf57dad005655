"""A standby for Serve's HTTP proxy: the gateway answers at the node's HTTP port while the proxy does not.

A node has one proxy. When it dies, Serve needs seconds and a live controller to start another. Linux distributes the
connections of a port among all listeners with ``SO_REUSEPORT``. The proxy sets this option, so the next proxy and the
gateways can share the port.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import httpx
import uvicorn
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from rollout_service.compat.ray_internals import http_options
from rollout_service.serve_callbacks import HEALTH_PATH

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
ANSWER_S = 1.0
"""Timeout of the proxy's health check in seconds. Taking over without need does no harm."""
BACKLOG = 2048
"""Number of connections that may wait to be accepted."""
RETRY_S = 1.0
"""Time in seconds after which connections are accepted again if no file descriptor was left."""
MARK = "X-Rollout-Standby"
"""Header that distinguishes a standby's answer from the proxy's."""


class Standby:
    """Listens at a node's HTTP port while no proxy answers there."""

    def __init__(
        self,
        app: ASGIApp,
        options: Callable[[], Awaitable[HTTPOptions]] = http_options,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create the standby. ``options`` returns the address of Serve's proxies once the controller knows it."""
        self._app, self._options_of, self._sleep = app, options, sleep
        self._stop: Callable[[], None] | None = None
        self._closed = False

    async def watch(self) -> None:
        """Open the listener when the proxy stops answering, and close it when it answers again. Runs until
        cancelled."""
        options = await self._options_of()
        if options.ssl_ca_certs is not None:
            logger.info("clients need a certificate here, so no gateway can check the proxy: it has no standby")
            return
        scheme = "http" if options.ssl_certfile is None else "https"
        url = f"{scheme}://{_reachable(options.host or '')}:{options.port}{HEALTH_PATH}"
        # a kept-alive connection would not show which process listens; the certificate names the service, not this
        # address
        limits = httpx.Limits(max_keepalive_connections=0)
        has_answered = False  # without a first answer there is no proxy on this node to replace
        async with httpx.AsyncClient(verify=False, timeout=ANSWER_S, limits=limits, trust_env=False) as http:
            while True:
                if await proxy_answers(http, url):
                    has_answered = True
                    self._stop_listening()
                elif has_answered and not self._closed:
                    self._listen(options)
                await self._sleep(PERIOD_S)

    def close(self) -> None:
        """Close the listener for good, because this gateway ends."""
        self._closed = True
        self._stop_listening()

    def _listen(self, options: HTTPOptions) -> None:
        if self._stop is not None:
            return
        try:
            self._stop = _answer_at_port(self._answer, options)
        except OSError as error:
            logger.warning("Serve's proxy does not answer, and this gateway cannot listen in its place: %s", error)
            return
        logger.warning("Serve's proxy does not answer at port %d: this gateway answers there meanwhile", options.port)

    def _stop_listening(self) -> None:
        if self._stop is not None:
            logger.info("Serve's proxy answers again, or this gateway ends: no request comes here directly any more")
            self._stop()
            self._stop = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == HEALTH_PATH:  # load balancers call the health route, too
            await PlainTextResponse("success", headers={MARK: "1"})(scope, receive, send)
        else:
            await _answer_while_connected(self._app, scope, receive, send)


async def _answer_while_connected(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run ``app``, and cancel it if the client disconnects before the reply is complete, as Serve's proxy does.

    uvicorn would only tell an app that asks.
    """
    messages = asyncio.Queue[Message](1)  # bounded, so that a body is read no faster than the app takes it
    is_complete = False

    async def read() -> None:
        while (message := await receive())["type"] != "http.disconnect":
            await messages.put(message)
        if is_complete:
            await messages.put(message)
        else:
            answering.cancel()

    async def pass_on(message: Message) -> None:
        nonlocal is_complete
        is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        await send(message)

    answering = asyncio.ensure_future(app(scope, messages.get, pass_on))
    reading = asyncio.create_task(read())
    try:
        await asyncio.wait([answering])
    finally:
        reading.cancel()
        answering.cancel()
        await asyncio.wait([reading, answering])
    if not answering.cancelled():
        answering.result()  # raises the app's error


def _answer_at_port(app: ASGIApp, options: HTTPOptions) -> Callable[[], None]:
    """Answer at Serve's HTTP port, one request per connection.

    Returns:
        A function that closes the listener and answers every connection that it has. asyncio's own server drops those
        that it has just accepted when it is closed.

    Raises:
        OSError: the port or the certificate cannot be used.
    """
    config = uvicorn.Config(
        app,
        interface="asgi3",  # uvicorn takes a bound method for an ASGI 2 app
        root_path=options.root_path,
        timeout_keep_alive=options.keep_alive_timeout_s,
        lifespan="off",
        access_log=False,
        log_config=None,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile_password=options.ssl_keyfile_password,
    )
    config.load()
    state = ServerState()
    # a kept connection would stay here when the proxy is back, and be lost if this process ends
    state.default_headers = [(b"connection", b"close")]
    # uvicorn annotates its protocols as asyncio's base class
    protocol = partial(config.http_protocol_class, config=config, server_state=state, app_state={})  # type: ignore[call-arg]
    host = options.host or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, options.port), family=family, backlog=BACKLOG, reuse_port=True)
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    connecting: set[asyncio.Task[object]] = set()

    def accept() -> None:
        try:
            while True:
                connection, _ = listener.accept()
                connection.setblocking(False)
                task = loop.create_task(loop.connect_accepted_socket(protocol, connection, ssl=config.ssl))
                connecting.add(task)
                task.add_done_callback(connected)
        except BlockingIOError:  # no more of them
            return
        except OSError as error:  # no file descriptor is left
            logger.warning("a connection to port %d has to wait: %s", options.port, error)
            loop.remove_reader(listener)
            loop.call_later(RETRY_S, listen)

    def connected(task: asyncio.Task[object]) -> None:
        connecting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # no TLS handshake, for example
            logger.debug("a connection to port %d failed: %s", options.port, error)

    def listen() -> None:
        if listener.fileno() >= 0:
            loop.add_reader(listener, accept)

    def close() -> None:
        loop.remove_reader(listener)
        accept()  # the kernel resets connections that still wait when their listener is closed
        listener.close()

    listen()
    return close


async def proxy_answers(http: httpx.AsyncClient, url: str) -> bool:
    """Return True if the proxy is healthy. Return False if a standby answers: then the proxy's state is unknown."""
    try:
        answer = await http.get(url)
    except httpx.TransportError:
        return False
    return answer.is_success and MARK not in answer.headers


def _reachable(host: str) -> str:
    """Return an address, in URL form, at which this node reaches a server that listens at ``host``."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host or "127.0.0.1"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return str(address) if address.version == 4 else f"[{address}]"
