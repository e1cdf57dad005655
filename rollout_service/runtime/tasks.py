"""Helpers for asyncio."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

from rollout_service.errors import NotReady, RolloutServiceError

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_MAX_WAIT = 64
"""Maximum wait after failures, in multiples of ``wait_s``."""


@asynccontextmanager
async def raise_first_failure() -> AsyncIterator[asyncio.TaskGroup]:
    """Run a TaskGroup that raises the first failure itself in place of an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
        return
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
    raise first


def start_watch(name: str, work: Coroutine[object, None, None]) -> asyncio.Task[None]:
    """Start work of a process's whole life in the background. If it fails, log the error. ``name``: for messages."""

    def log_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s has failed, and is not started again: restart this process", name, exc_info=error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(log_failure)
    return task


class ShieldedTasks:
    """Runs work that continues if its waiter is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    async def run(self, work: Coroutine[object, None, _Result]) -> _Result:
        """Await ``work``. If the waiter is cancelled, a failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_unheard)
            raise


def _log_unheard(task: asyncio.Task[object]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        trace = None if isinstance(error, RolloutServiceError) else error
        logger.warning("a call whose caller has left has failed: %s", error, exc_info=trace)


class RepeatedTask:
    """Work that a process repeats in the background. After each failure, it waits twice as long as before."""

    def __init__(self, name: str, work: Callable[[], Awaitable[None]], wait_s: float) -> None:
        """
        Args:
            name: the task, for messages.
            work: one turn, which itself waits until there is something to do.
            wait_s: half of the wait after the first failure, in seconds.
        """
        self._name, self._work, self._wait_s = name, work, wait_s
        self._task: asyncio.Task[None] | None = None
        self.problem: Exception | None = None
        """The error of the last turn; None: it has succeeded."""

    def begin(self) -> None:
        """Start the task."""
        self._task = start_watch(self._name, self._repeat())

    def end(self) -> None:
        """Cancel the task."""
        if self._task is not None:
            self._task.cancel()

    def check(self) -> None:
        """Raise RolloutServiceError if the task has ended."""
        if self._task is not None and self._task.done():
            raise RolloutServiceError(f"{self._name} has stopped: its task ended; restart this process")

    async def _repeat(self) -> None:
        wait_s = self._wait_s
        while True:
            try:
                await self._work()
                self.problem, wait_s = None, self._wait_s
            except (RolloutServiceError, OSError) as error:  # the next turn tries again
                if str(error) != str(self.problem):
                    logger.warning("%s has failed, and is tried again: %s", self._name, error)
                self.problem, wait_s = error, min(2 * wait_s, _MAX_WAIT * self._wait_s)
                await asyncio.sleep(wait_s)


_ENDING = "this process is ending and another one takes its place: send it again"


class ClosableLock:
    """A lock that can be closed: nobody can acquire it afterwards."""

    def __init__(self) -> None:
        self._lock, self._closed = asyncio.Lock(), False

    async def __aenter__(self) -> None:
        """Acquire the lock. Raises NotReady once it is closed."""
        await self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise NotReady(_ENDING)

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()

    async def close(self) -> None:
        """Close the lock, and return when its current holder has released it."""
        self._closed = True
        async with self._lock:
            pass


class ChangeNotifier:
    """Notifies waiters of changes, so that each checks its condition."""

    def __init__(self) -> None:
        self._changed, self._ended = asyncio.Condition(), False

    async def notify(self) -> None:
        """Notify all waiters of a change."""
        async with self._changed:
            self._changed.notify_all()

    async def end(self) -> None:
        """End all waits: nothing will change any more."""
        self._ended = True
        await self.notify()

    async def wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``reached()``, or for ``timeout_s``; return True if it is reached. Raises NotReady after
        ``end``."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self._ended or reached())
            except TimeoutError:
                return reached()
        if self._ended and not reached():
            raise NotReady(_ENDING)
        return True
