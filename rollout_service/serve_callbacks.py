"""Callbacks of Serve's controller and HTTP proxies, which deployment files name in ``controller_options``.

Both processes end at SIGTERM, so that Ray or Serve replaces them at once: with Ray's own handler, a process lives on
and answers no call (see ``runtime/drain.py``). A proxy holds requests until it has its routes.
"""

import asyncio
import time

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_service.runtime.connections import SERVED_FILES, raise_open_files
from rollout_service.runtime.drain import end_on_sigterm

HEALTH_PATH = "/-/healthz"
"""The health check of Serve's proxies; 200 once they have routes."""
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
    """Holds requests that arrive before the proxy has its routes. Serve answers these with 404, and no client repeats
    that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._ready = app, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI app does."""
        if not self._ready and scope["type"] == "http" and scope["path"] != HEALTH_PATH:
            await self._wait(scope)
        await self._app(scope, receive, send)

    async def _wait(self, scope: Scope) -> None:
        deadline = time.monotonic() + MAX_HOLD_S
        while not await self._is_healthy(scope) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    async def _is_healthy(self, scope: Scope) -> bool:
        """Ask the proxy for its health, within this process."""

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._ready = message["status"] == 200

        asked = {**scope, "method": "GET", "path": HEALTH_PATH, "raw_path": HEALTH_PATH.encode(), "query_string": b""}
        await self._app(asked, receive, send)
        return self._ready
