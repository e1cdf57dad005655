"""The blocking client. It runs the asynchronous client on an event loop in its own thread."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import httpx

from rollout_service.client._client import RolloutClient
from rollout_service.client._generate import GenerateOptions, Prompt
from rollout_service.client._sessions import AgentSession
from rollout_service.client._stream import PartialRollout, RolloutStream, StreamPiece
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.sessions import Session

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _blocking(
    method: Callable[Concatenate[RolloutClient, Parameters], Coroutine[object, None, Result]],
) -> Callable[Concatenate["SyncRolloutClient", Parameters], Result]:
    """Return a blocking version of a RolloutClient method, with the same parameters and documentation."""

    @functools.wraps(method)
    def call(self: "SyncRolloutClient", /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return self._wait(functools.partial(method, self._client, *args, **kwargs))

    return call


class SyncRolloutClient:
    """RolloutClient without ``await``, for scripts and notebooks, with the same arguments. Thread-safe.

    Use it as ``with SyncRolloutClient(url) as client:`` or call ``close()``. Ctrl-C in a call cancels the call on the
    service too. Progress callbacks run in this client's thread and must not call the client.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        max_connections: int | None = None,
        timeout_s: float | None = None,
        retries: int = 8,
        ca_file: Path | str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client = RolloutClient(
            url,
            token=token,
            max_connections=max_connections,
            timeout_s=timeout_s,
            retries=retries,
            ca_file=ca_file,
            transport=transport,
        )
        # held to schedule: the loop drops what comes after its last turn. Reentrant: a signal handler may close
        self._lock, self._closed = threading.RLock(), False
        running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(running)), name="rollout-client", daemon=True
        )
        self._thread.start()
        self._loop, self._closing = running.result()

    generate = _blocking(RolloutClient.generate)
    generate_batch = _blocking(RolloutClient.generate_batch)
    score = _blocking(RolloutClient.score)
    push_weights = _blocking(RolloutClient.push_weights)
    push_path = _blocking(RolloutClient.push_path)
    push_adapter = _blocking(RolloutClient.push_adapter)
    rollback_adapter = _blocking(RolloutClient.rollback_adapter)
    adapters = _blocking(RolloutClient.adapters)
    remove_adapter = _blocking(RolloutClient.remove_adapter)
    rollback = _blocking(RolloutClient.rollback)
    report_mismatch = _blocking(RolloutClient.report_mismatch)
    mismatch = _blocking(RolloutClient.mismatch)
    discard = _blocking(RolloutClient.discard)
    wait_live = _blocking(RolloutClient.wait_live)
    weights = _blocking(RolloutClient.weights)
    recipe = _blocking(RolloutClient.recipe)
    pause = _blocking(RolloutClient.pause)
    resume = _blocking(RolloutClient.resume)
    is_paused = _blocking(RolloutClient.is_paused)
    sleep = _blocking(RolloutClient.sleep)
    wake_up = _blocking(RolloutClient.wake_up)
    is_sleeping = _blocking(RolloutClient.is_sleeping)
    fleet = _blocking(RolloutClient.fleet)
    models = _blocking(RolloutClient.models)
    health = _blocking(RolloutClient.health)

    def generate_stream(
        self, prompt: Prompt, *, request_id: str | None = None, **options: Unpack[GenerateOptions]
    ) -> "SyncRolloutStream":
        """Stream ``generate``: ``with client.generate_stream(prompt) as stream:``.

        ``for piece in stream:`` yields the pieces of ``RolloutClient.generate_stream``; the arguments are the same.
        """
        return SyncRolloutStream(self._client.generate_stream(prompt, request_id=request_id, **options), self)

    def session(self, session_id: str | None = None, *, ttl_s: float = 3600.0) -> "SyncAgentSession":
        """Open a session, as ``RolloutClient.session`` does: ``with client.session() as session:``."""
        return SyncAgentSession(self._client.session(session_id, ttl_s=ttl_s), self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the calls of other threads, close all connections and end the thread. Further calls do nothing."""
        with self._locked:
            if self._is_open:
                self._loop.call_soon_threadsafe(self._closing.set)
            self._closed = True
        self._thread.join()

    @property
    def _is_open(self) -> bool:
        return not self._closed and self._thread.is_alive()  # a forked process has no such thread

    @property
    def _locked(self) -> AbstractContextManager[object]:
        # a forked process may have a copy of the lock that another thread held, and nothing to schedule
        return self._lock if self._thread.is_alive() else nullcontext()

    async def _serve(self, running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        closing = asyncio.Event()
        running.set_result((asyncio.get_running_loop(), closing))
        await closing.wait()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._client.aclose()

    def _wait(self, begin: Callable[[], Coroutine[object, None, Result]]) -> Result:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a progress callback may not call its own SyncRolloutClient: it would wait for itself")
        # in this thread, because a push of weights uses its CUDA device and stream
        coroutine = begin()
        begun: list[asyncio.Task[Any] | None] = []
        given_up = threading.Event()

        async def call() -> Result:
            begun.append(asyncio.current_task())
            if given_up.is_set():
                coroutine.close()
                raise asyncio.CancelledError
            return await coroutine

        try:
            with self._locked:
                if not self._is_open:
                    raise RuntimeError("this SyncRolloutClient is closed: make a new one")
                future = asyncio.run_coroutine_threadsafe(call(), self._loop)
            return future.result()
        finally:  # Ctrl-C may interrupt the wait, or come before the future exists
            given_up.set()
            if not begun:
                coroutine.close()  # nothing awaits it any more
            with self._locked:
                for task in begun:
                    if task is not None and not task.done() and self._is_open:  # closing cancels it, too
                        self._loop.call_soon_threadsafe(task.cancel)


class SyncRolloutStream:
    """RolloutStream without ``await``."""

    def __init__(self, stream: RolloutStream, client: SyncRolloutClient) -> None:
        self._stream, self._client = stream, client

    @property
    def rollout(self) -> Rollout:
        """The complete rollout. Raises RuntimeError before the last piece was read."""
        return self._stream.rollout

    @property
    def partial(self) -> PartialRollout:
        """The tokens read so far, in a form that ``generate_batch`` can continue after the block has ended."""
        return self._stream.partial

    def __enter__(self) -> Self:
        self._client._wait(self._stream.open)
        return self

    def __exit__(self, *_: object) -> None:
        self._client._wait(self._stream.aclose)

    def __iter__(self) -> Iterator[StreamPiece]:
        while (piece := self._client._wait(self._stream.next)) is not None:
            yield piece


class SyncAgentSession:
    """AgentSession without ``await``. The agent may run in this thread.

    Use ``with client.session() as session:``, then give ``session.openai_base_url`` to an agent. The service deletes
    the session when the block ends. Read the trajectory before.
    """

    def __init__(self, session: AgentSession, client: SyncRolloutClient) -> None:
        self._session, self._client = session, client

    @property
    def session_id(self) -> str:
        """The session's id, also for the header ``X-Session-ID``."""
        return self._session.session_id

    @property
    def openai_base_url(self) -> str:
        """The ``base_url`` for OpenAI's clients."""
        return self._session.openai_base_url

    @property
    def anthropic_base_url(self) -> str:
        """The ``base_url`` for Anthropic's clients."""
        return self._session.anthropic_base_url

    def trajectory(self) -> Session:
        """Return every turn so far: prompt and sampled tokens, logprobs and weight versions. Raises NotFound."""
        return self._client._wait(self._session.trajectory)

    def open(self) -> Self:
        """Open the session, as ``with`` does. Raises VersionConflict if the id is in use, Overloaded."""
        self._client._wait(self._session.open)
        return self

    def close(self) -> None:
        """Delete the session on the service, if it still exists."""
        self._client._wait(self._session.close)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()
