"""A gateway answers at the HTTP port of its node itself while Serve's proxy there does not.

A node has one proxy. After its death Serve needs seconds, and a controller that lives, to start another. Linux gives
the connections of a port to all processes that listen with ``SO_REUSEPORT``, as the proxy does, so the next proxy and
the gateways can share it.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable

import httpx
import uvicorn
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_service.ray_internals import http_options
from rollout_service.serve_callbacks import HEALTH_PATH

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
ANSWER_S = 1.0
"""A proxy that takes longer for its health check gets help. Help that it did not need does no harm."""
MARK = "X-Rollout-Standby"
"""Header by which a standby's answer differs from the proxy's."""


class Standby:
    """Listens at a node's HTTP port while nobody else answers there."""

    def __init__(
        self,
        app: ASGIApp,
        options: Callable[[], Awaitable[HTTPOptions]] = http_options,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            app: Answers the requests.
            options: Returns where Serve's proxies listen, once the controller says so.
            sleep: Wait for seconds.
        """
        self._app, self._options_of, self._sleep = app, options, sleep
        self._server: uvicorn.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._closed = False

    async def watch(self) -> None:
        """Open and close the listener as the proxy comes and goes, until cancelled."""
        options = await self._options_of()
        if options.ssl_ca_certs is not None:
            logger.info("clients need a certificate here, so no gateway can check the proxy: it has no standby")
            return
        scheme = "http" if options.ssl_certfile is None else "https"
        url = f"{scheme}://{_reachable(options.host or '')}:{options.port}{HEALTH_PATH}"
        # a kept connection would say nothing of the port; the certificate names the service, not this address
        limits = httpx.Limits(max_keepalive_connections=0)
        has_answered = False  # where no proxy ever was, nobody expects an answer
        async with httpx.AsyncClient(verify=False, timeout=ANSWER_S, limits=limits, trust_env=False) as http:
            while True:
                if await _proxy_answers(http, url):
                    has_answered = True
                    self._stop_listening()
                elif has_answered and not self._closed:
                    self._listen(options)
                await self._sleep(PERIOD_S)

    def close(self) -> None:
        """Take no more connections: this gateway ends."""
        self._closed = True
        self._stop_listening()

    def _listen(self, options: HTTPOptions) -> None:
        if self._server is not None:
            return
        address = (options.host or "", options.port)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            listener = socket.create_server(address, family=family, backlog=2048, reuse_port=True)
        except OSError as error:
            logger.warning("Serve's proxy does not answer, and this gateway cannot listen in its place: %s", error)
            return
        logger.warning("Serve's proxy does not answer at port %d: this gateway answers there meanwhile", options.port)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._answer,
                interface="asgi3",  # uvicorn takes a bound method for an app of ASGI 2
                root_path=options.root_path,
                timeout_keep_alive=options.keep_alive_timeout_s,
                lifespan="off",
                access_log=False,
                log_config=None,
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile_password=options.ssl_keyfile_password,
            )
        )
        task = asyncio.create_task(self._server.serve([listener]))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def _stop_listening(self) -> None:
        """Close the listener. Requests that are open are answered."""
        if self._server is not None:
            logger.info("Serve's proxy answers again, or this gateway ends: no request comes here directly any more")
            self._server.should_exit = True
            self._server = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == HEALTH_PATH:  # load balancers ask for it, too
            await PlainTextResponse("success", headers={MARK: "1"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _proxy_answers(http: httpx.AsyncClient, url: str) -> bool:
    """Return whether the proxy has routes. False, too, if a standby answers: then nothing is known of the proxy."""
    try:
        answer = await http.get(url)
    except httpx.TransportError:
        return False
    return answer.is_success and MARK not in answer.headers


def _reachable(host: str) -> str:
    """Return an address by which this node reaches a server that listens at ``host``, as a URL spells it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host or "127.0.0.1"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return str(address) if address.version == 4 else f"[{address}]"
