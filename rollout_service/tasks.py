"""What client and gateway share of asyncio."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
