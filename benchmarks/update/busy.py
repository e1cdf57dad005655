"""A constant number of requests under way while something else is measured."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def busy(concurrent: int, request: Callable[[int], Awaitable[object]]) -> AsyncIterator[None]:
    """So many at any time until the block ends; those under way are waited for.

    ``request`` makes one, and is given which of the ``concurrent`` it is.
    """
    stop = asyncio.Event()

    async def work(number: int) -> None:
        while not stop.is_set():
            await request(number)

    async with asyncio.TaskGroup() as group:
        for number in range(concurrent):
            group.create_task(work(number))
        try:
            yield
        finally:
            stop.set()
