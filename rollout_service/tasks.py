"""What the parts of the service share of asyncio."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

_Result = TypeVar("_Result")


@asynccontextmanager
async def raise_first_failure() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises the first failure itself in place of an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
        return
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
    raise first


class Unabandoned:
    """Work that goes on when whoever waits for it goes away."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Await ``work``."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)


class Changes:
    """Lets many wait until something that others change is so."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()

    async def notify(self) -> None:
        """Something has changed."""
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Return once ``reached``, or after ``timeout_s``; whether it is."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(reached)
            except TimeoutError:
                return reached()
        return True
