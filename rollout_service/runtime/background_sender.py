"""Send items to another deployment in the background: a bounded queue, and one task that empties it."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from rollout_service.errors import RolloutServiceError

FULL = "its queue is full"
"""The reason for dropping an item that does not fit."""


class HasCost(Protocol):
    """An item with a size."""

    @property
    def cost_tokens(self) -> int:
        """Return its size in the queue, in tokens."""


_Item = TypeVar("_Item", bound=HasCost)


class BackgroundSender(Generic[_Item]):
    """Sends items in the background. Items that do not fit or do not arrive are dropped and reported."""

    def __init__(
        self,
        send: Callable[[list[_Item]], Awaitable[object]],
        dropped: Callable[[int, str], None],
        *,
        room_tokens: int,
        batch_tokens: int,
        send_s: float,
        sent: Callable[[], None] = lambda: None,
    ) -> None:
        """``send`` gets one batch at a time, of at most ``batch_tokens``; a single item may be larger.

        ``dropped`` gets a number of items and the reason: the queue of ``room_tokens`` was full, or the batch did not
        arrive within ``send_s`` seconds. ``sent`` is called after each successful batch.
        """
        self._send, self._dropped, self._sent = send, dropped, sent
        self._room_tokens, self._batch_tokens, self._send_s = room_tokens, batch_tokens, send_s
        self._queue: deque[_Item] = deque()
        self._queued_tokens = 0
        self._sender: asyncio.Task[None] | None = None

    def put(self, item: _Item) -> None:
        """Queue an item; returns at once."""
        if self._queued_tokens + item.cost_tokens > self._room_tokens:
            self._dropped(1, FULL)
            return
        self._queue.append(item)
        self._queued_tokens += item.cost_tokens
        if self._sender is None or self._sender.done():
            # not in the request's context: Serve cancels calls made in a request's context along with it
            self._sender = asyncio.get_running_loop().create_task(self._empty(), context=contextvars.Context())

    async def flushed(self, timeout_s: float) -> None:
        """Return once all queued items have been sent or dropped, or after ``timeout_s``."""
        if self._sender is not None and not self._sender.done():
            await asyncio.wait([self._sender], timeout=timeout_s)

    async def _empty(self) -> None:
        while self._queue:
            batch = self._batch()
            try:
                async with asyncio.timeout(self._send_s):
                    await self._send(batch)
            except (RolloutServiceError, TimeoutError) as error:
                self._dropped(len(batch), repr(error))
            else:
                self._sent()

    def _batch(self) -> list[_Item]:
        batch = [self._queue.popleft()]
        tokens = batch[0].cost_tokens
        while self._queue and tokens + self._queue[0].cost_tokens <= self._batch_tokens:
            batch.append(self._queue.popleft())
            tokens += batch[-1].cost_tokens
        self._queued_tokens -= tokens
        return batch
