"""Requests that are still open when a gateway must end: they are told to come again, and no connection breaks."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_service.errors import NotReady
from rollout_service.web.errors import error_response


class OpenRequests:
    """Those of one gateway."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[object]] = set()
        self._refused: set[asyncio.Task[object]] = set()

    def refuse(self) -> None:
        """End them all: each is answered 503 with ``Retry-After``, and what it waited for is cancelled."""
        self._refused |= self._open
        for request in self._open:
            request.cancel()

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """``app`` with its open requests noted."""

        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
            else:
                await self._answer(app, scope, receive, send)

        return noting

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        request, answered = asyncio.current_task(), False
        assert request is not None

        async def noting_send(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        self._open.add(request)
        try:
            await app(scope, receive, noting_send)
        except asyncio.CancelledError:
            if request not in self._refused or answered:
                raise
            request.uncancel()
            error = NotReady(f"this gateway ends before {scope['method']} {scope['path']} was answered: send it again")
            await error_response(error)(scope, receive, send)
        finally:
            self._open.discard(request)
            self._refused.discard(request)
