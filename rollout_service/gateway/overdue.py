"""Requests that are still open when a gateway must end: they are told to come again, and no connection breaks."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_service import ray_internals
from rollout_service.errors import NotReady
from rollout_service.web.errors import error_response

_POLL_S = 1.0
_ANSWERS_S = 2.0
"""Serve's controller answers within it, unless it has too much to do to ask for anybody's health."""


class OpenRequests:
    """Those of one gateway."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[object]] = set()
        self._refused: set[asyncio.Task[object]] = set()

    def refuse(self) -> None:
        """End them all: each is answered 503 with ``Retry-After``, and what it waited for is cancelled."""
        unanswered = self._open - self._refused  # an answer that is under way must not be cancelled
        self._refused |= unanswered
        for request in unanswered:
            request.cancel()

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._open)

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
            if not answered and request in self._refused:
                # vLLM's classes take a cancelled task for a caller that has left, and answer 400
                raise asyncio.CancelledError
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


class Removal:
    """Serve removes a gateway without a word: it asks for its health no more, waits for what is open, and kills it.

    So it does when the application ends (SIGTERM to ``rollout-service serve``, ``serve shutdown``), when another one is
    deployed in its place, and when its node is drained.
    """

    def __init__(
        self,
        open_requests: OpenRequests,
        after_s: float,
        controller_answered: Callable[[float], Awaitable[bool]] = ray_internals.controller_answered,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            open_requests: What is refused.
            after_s: How long after the removal.
            controller_answered: Whether Serve's controller answered within so many seconds.
            clock, sleep: In seconds.
        """
        self._open, self._after_s = open_requests, after_s
        self._controller_answered, self._clock, self._sleep = controller_answered, clock, sleep
        self._since = clock()

    def asked(self) -> None:
        """Serve has just asked for this gateway's health."""
        self._since = self._clock()

    async def watch(self) -> None:
        """Without end: refuse what is open once Serve has not asked for so long, although its controller lives."""
        while True:
            await self._sleep(_POLL_S)
            if not self._open.any or self._clock() - self._since < 2 * _POLL_S:
                continue
            if not await self._controller_answered(_ANSWERS_S):
                self.asked()  # a controller that is started anew has yet to find the replicas
            elif self._clock() - self._since > self._after_s:
                self._open.refuse()
