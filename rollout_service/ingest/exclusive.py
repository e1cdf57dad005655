"""Changes of the log, one at a time, each finished although its caller disconnects."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from rollout_service.runtime.tasks import ClosableLock, ShieldedTasks

_Method = TypeVar("_Method", bound=Callable[..., Coroutine[Any, Any, object]])


class _Writer(Protocol):
    _writing: ClosableLock
    """Held by the task that writes the log, or changes what is staged."""
    _shielded: ShieldedTasks


def exclusive(change: _Method) -> _Method:
    """Run a method of a writer of the log alone, and to its end although its caller disconnects.

    Raises NotReady once the ingest stops.
    """

    @wraps(change)
    async def whole(self: _Writer, *args: object, **named: object) -> object:
        async def alone() -> object:
            async with self._writing:
                return await change(self, *args, **named)

        return await self._shielded.run(alone())

    return cast(_Method, whole)
