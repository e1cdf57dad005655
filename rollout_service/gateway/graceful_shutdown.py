"""Open requests of a gateway that must end. They are answered with 503 and ``Retry-After``, so that no connection
breaks."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from ray.exceptions import RayError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_service.compat import ray_internals
from rollout_service.errors import NotReady
from rollout_service.web.errors import error_response

_POLL_S = 1.0


class OpenRequests:
    """The open requests of one gateway."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[object]] = set()
        self._refused: set[asyncio.Task[object]] = set()

    def refuse(self) -> None:
        """Cancel all open requests, and answer each with 503 and ``Retry-After``."""
        unanswered = self._open - self._refused  # a reply that is being sent must not be cancelled
        self._refused |= unanswered
        for request in unanswered:
            request.cancel()

    @property
    def any(self) -> bool:
        """True if there are open requests."""
        return bool(self._open)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return ``app`` with tracking of its open requests."""

        async def count_open(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
            else:
                await self._answer(app, scope, receive, send)

        return count_open

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        request, answered = asyncio.current_task(), False
        assert request is not None

        async def send_noted(message: Message) -> None:
            nonlocal answered
            if not answered and request in self._refused:
                # vLLM's classes take a cancelled task for a disconnected client, and answer 400
                raise asyncio.CancelledError
            answered = True
            await send(message)

        async def receive_or_end() -> Message:
            try:
                return await receive()
            except RayError:  # Serve raises it for a client that disconnects while the machine is busy
                return {"type": "http.disconnect"}

        self._open.add(request)
        try:
            await app(scope, receive_or_end, send_noted)
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
    """Detects that Serve is removing this gateway.

    Serve removes a gateway without notice: it stops its health checks, waits for open requests, and kills the process.
    This happens when the application ends (SIGTERM to ``rollout-service serve``, ``serve shutdown``). It also happens
    on a redeployment and when the node is drained.
    """

    def __init__(
        self,
        open_requests: OpenRequests,
        after_s: float,
        controller_answered: Callable[[float], Awaitable[bool]] = ray_internals.controller_answered,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create the watcher.

        Args:
            open_requests: the requests to refuse.
            after_s: seconds between the last health check and the refusal.
            controller_answered: returns True if Serve's controller answers within the given seconds.
            clock, sleep: the time source, in seconds.
        """
        self._open, self._after_s = open_requests, after_s
        self._controller_answered, self._clock, self._sleep = controller_answered, clock, sleep
        self._since = clock()

    def note_health_check(self) -> None:
        """Record a health check by Serve."""
        self._since = self._clock()

    async def watch(self) -> None:
        """Run until cancelled. Refuse open requests if health checks have stopped for ``after_s`` while the controller
        lives."""
        while True:
            await self._sleep(_POLL_S)
            if not self._open.any or self._clock() - self._since < 2 * _POLL_S:
                continue
            if not await self._controller_answered(ray_internals.ANSWERS_S):
                self.note_health_check()  # a restarted controller has yet to find its replicas
            elif self._clock() - self._since > self._after_s:
                self._open.refuse()
