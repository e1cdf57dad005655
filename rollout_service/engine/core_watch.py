"""Notice a vLLM engine core that hangs: its process lives, and answers nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress


class CoreWatch:
    """Asks the engine core a question again and again, and measures how long it has not answered."""

    def __init__(self, ask: Callable[[], Awaitable[object]], clock: Callable[[], float] = time.monotonic) -> None:
        """Create the watch. ``ask``: returns when the core has answered. ``clock``: in seconds."""
        self._ask, self._clock = ask, clock
        self._question: asyncio.Task[None] | None = None
        self._since = 0.0

    def silent_s(self, excused: bool) -> float:
        """Return for how many seconds the core has not answered, and ask it again if it has.

        ``excused``: True while the core cannot answer; the time starts anew afterwards.
        """
        now = self._clock()
        if self._question is None or self._question.done():
            self._question, excused = asyncio.create_task(self._until_answered()), True
        if excused:
            self._since = now
        return now - self._since

    async def _until_answered(self) -> None:
        with suppress(Exception):  # a refusal is an answer; vLLM reports a dead process elsewhere
            await self._ask()
