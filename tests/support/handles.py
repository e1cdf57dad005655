"""Deployment handles in front of objects that have ``remote`` methods, such as Ray actors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any


class FakeMethod:
    """The method of a deployment handle. Its calls go to ``remote``."""

    remote: Any

    @asynccontextmanager
    async def choose_replica(self, *args: object, **named: object) -> AsyncIterator[SimpleNamespace]:
        """Choose the only replica."""
        yield SimpleNamespace(replica_id="a")

    def dispatch(self, replica: SimpleNamespace, *args: object, **named: object) -> Any:
        """Send the call."""
        return self.remote(*args, **named)
