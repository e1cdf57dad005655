"""Callbacks of Serve's controller and HTTP proxies, which deployment files name in ``controller_options``.

Both processes end at SIGTERM, so that Ray or Serve replaces them at once: with Ray's own handler, a process lives on
and answers no call (see ``runtime/drain.py``). A proxy holds requests until it has its routes, and answers 503 once
it has none.
"""

import asyncio
import json
import time

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_service.errors import NotReady
from rollout_service.runtime.connections import SERVED_FILES, raise_open_files
from rollout_service.runtime.drain import end_on_sigterm
from rollout_service.web.errors import error_response

HEALTH_PATH = "/-/healthz"
"""The health check of Serve's proxies; 200 once they have routes."""
ROUTES_PATH = "/-/routes"
"""The application of each route; ``{}`` once the last application is deleted."""
POLL_S = 0.05
MAX_HOLD_S = 10.0
"""Maximum time in seconds for holding a request; a proxy without any application never has routes."""


def in_controller() -> None:
    """End this process at SIGTERM; Ray starts another controller, which takes over the replicas."""
    end_on_sigterm()


def in_proxy() -> list[Middleware]:
    """End this process at SIGTERM; the controller starts another proxy. Return the middlewares that Serve adds."""
    end_on_sigterm()
    raise_open_files(SERVED_FILES)
    return [Middleware(HoldUntilReady)]


class HoldUntilReady:
    """Holds requests that arrive before the proxy has its routes, and answers 503 once it has none any more. Serve
    answers both with 404, and no client repeats that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._ready = app, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI app does."""
        if scope["type"] != "http" or scope["path"] == HEALTH_PATH:
            await self._app(scope, receive, send)
            return
        if not self._ready:
            await self._wait(scope)
        is_refused = False

        async def send_unless_refused(message: Message) -> None:
            nonlocal is_refused
            if message["type"] == "http.response.start" and message["status"] == 404:
                status, body = await self._ask(scope, ROUTES_PATH)
                is_refused = status == 200 and json.loads(body) == {}
            if not is_refused:
                await send(message)

        await self._app(scope, receive, send_unless_refused)
        if is_refused:
            what = f"{scope['method']} {scope['path']}: the service is ending, or not deployed yet; send it again"
            await error_response(NotReady(what))(scope, receive, send)

    async def _wait(self, scope: Scope) -> None:
        deadline = time.monotonic() + MAX_HOLD_S
        while not self._ready and time.monotonic() < deadline:
            status, _ = await self._ask(scope, HEALTH_PATH)
            self._ready = status == 200
            if not self._ready:
                await asyncio.sleep(POLL_S)

    async def _ask(self, scope: Scope, path: str) -> tuple[int, bytes]:
        """Return the proxy's own reply to ``GET path``: its status and its body."""
        status, body = 0, b""

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, body
            status, body = message.get("status", status), body + message.get("body", b"")

        asked = {**scope, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        await self._app(asked, receive, send)
        return status, body
