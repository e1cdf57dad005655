"""The blocking client: the asynchronous one on an event loop in a thread of its own."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from rollout_service.client._client import RolloutClient

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _blocking(
    method: Callable[Concatenate[RolloutClient, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate["SyncRolloutClient", Parameters], Result]:
    """A method of RolloutClient as one that waits; same parameters, same documentation."""

    @functools.wraps(method)
    def call(self: "SyncRolloutClient", /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return self._wait(method, *args, **kwargs)

    return call


class SyncRolloutClient:
    """RolloutClient without ``await``, for scripts and notebooks; same arguments. Any thread may call it.

    Use it as ``with SyncRolloutClient(url) as client:`` or call ``close()``. Ctrl-C in a call cancels it on the
    service too. Progress callbacks run in this client's thread, and must not call it.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        max_connections: int = 1024,
        timeout_s: float | None = None,
        retries: int = 8,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client = RolloutClient(
            url,
            token=token,
            max_connections=max_connections,
            timeout_s=timeout_s,
            retries=retries,
            transport=transport,
        )
        running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(running)), name="rollout-client", daemon=True
        )
        self._thread.start()
        self._loop, self._closing = running.result()

    generate = _blocking(RolloutClient.generate)
    generate_batch = _blocking(RolloutClient.generate_batch)
    push_weights = _blocking(RolloutClient.push_weights)
    push_path = _blocking(RolloutClient.push_path)
    report_mismatch = _blocking(RolloutClient.report_mismatch)
    mismatch = _blocking(RolloutClient.mismatch)
    discard = _blocking(RolloutClient.discard)
    wait_live = _blocking(RolloutClient.wait_live)
    weights = _blocking(RolloutClient.weights)
    pause = _blocking(RolloutClient.pause)
    resume = _blocking(RolloutClient.resume)
    is_paused = _blocking(RolloutClient.is_paused)
    sleep = _blocking(RolloutClient.sleep)
    wake_up = _blocking(RolloutClient.wake_up)
    is_sleeping = _blocking(RolloutClient.is_sleeping)
    fleet = _blocking(RolloutClient.fleet)
    models = _blocking(RolloutClient.models)
    health = _blocking(RolloutClient.health)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel calls of other threads, close every connection and end the thread. Again: nothing happens."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    async def _serve(self, running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        closing = asyncio.Event()
        running.set_result((asyncio.get_running_loop(), closing))
        await closing.wait()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._client.aclose()

    def _wait(
        self,
        method: Callable[Concatenate[RolloutClient, Parameters], Coroutine[Any, Any, Result]],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a progress callback may not call its own SyncRolloutClient: it would wait for itself")
        if not self._thread.is_alive():
            raise RuntimeError("this SyncRolloutClient is closed: make a new one")
        begun: list[asyncio.Task[Any] | None] = []
        given_up = threading.Event()

        async def call() -> Result:
            begun.append(asyncio.current_task())
            if given_up.is_set():
                raise asyncio.CancelledError
            return await method(self._client, *args, **kwargs)

        try:
            return asyncio.run_coroutine_threadsafe(call(), self._loop).result()
        finally:  # Ctrl-C may end the wait, and also come before there is a future to wait for
            given_up.set()
            for task in begun:
                if task is not None and not task.done():
                    self._loop.call_soon_threadsafe(task.cancel)
