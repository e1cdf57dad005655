"""An event loop whose clock jumps to the next timer, so that minutes of waiting take milliseconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

_T = TypeVar("_T")


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            if timeout is None:
                raise RuntimeError("nothing runs, and no timer is set: the program waits forever")
            self.now += timeout
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs programs that wait for timers and each other only."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_in_virtual_time(program: Coroutine[object, object, _T]) -> _T:
    """Run a program to its end."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(program)
    finally:
        loop.close()
