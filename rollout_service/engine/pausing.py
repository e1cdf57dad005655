"""What keeps one engine from sampling: a pause or a sleep that was ordered, and a version that is loaded.

The mode ``wait`` lets running rollouts finish first, which takes as long as the longest of them. It therefore runs in
a task of its own, and can be taken back by a resume, or taken over by another mode. vLLM 0.32 allows both: its
scheduler takes each new state at once (``EngineCoreProc.pause_scheduler``), and only the answer to a waiting pause is
held back until the engine is idle.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.weight_log import Control, DesiredState


class PausableEngine(Protocol):
    """What is needed of the engine adapter. A cancelled ``pause`` leaves the engine to the next pause or resume."""

    async def abort(self) -> None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self) -> object: ...
    async def wake_up(self) -> None: ...


class Pausing:
    """Closes and opens one engine. Of two instructions about running rollouts the newer one counts."""

    def __init__(self, engine: PausableEngine, drained: Callable[[], None]) -> None:
        """``drained``: called when the last running rollout of a pause with ``wait`` has finished."""
        self._engine, self._drained = engine, drained
        self._mode: PauseMode | None = None
        self._taken = ""
        self._drain: asyncio.Task[None] | None = None
        self._for_version = False
        self.asleep = False
        """Whether the engine gave its memory back."""
        self.obeyed = ""
        """The last order that the engine is as."""
        self.aborted = 0
        """The largest ``DesiredState.abort`` that was obeyed."""
        self.returns = 0
        """Aborts, and pauses that return what they abort, so far. A call during which this grows is not to be
        continued."""

    @property
    def paused(self) -> bool:
        """Whether a pause was ordered and nothing runs any more."""
        return self._mode is not None and self.obeyed == self._taken

    def drains(self) -> bool:
        """Whether running rollouts are being waited for. Raises what ended a wait that failed."""
        if self._drain is None:
            return False
        if self._drain.done():
            self._drain.result()
            return False
        return True

    def begin(self, control: Control) -> None:
        """The order in force when an engine that runs nothing starts, closed until its first version is loaded."""
        # one that is to sleep has still to do so
        self._taken = self.obeyed = "" if control.asleep else control.order
        self._mode, self._for_version = control.mode if control.paused else None, True

    async def obey(self, desired: DesiredState) -> bool:
        """Do what is ordered; whether that has become so just now. Does not wait for running rollouts.

        Raises MemoryTaken from an engine that cannot wake; the next call tries again.
        """
        has_aborted = desired.abort > self.aborted
        if has_aborted:
            self.returns += 1
            await self._engine.abort()
            self.aborted = desired.abort
        return await self._obey_order(desired) or has_aborted

    async def _obey_order(self, desired: DesiredState) -> bool:
        if desired.order != self._taken:
            before, self._taken = self._mode, desired.order
            self._mode = desired.pause_mode if desired.paused else None
            if self._mode != before:
                self.returns += self._mode == "abort" and desired.on_abort == "return"
                await self._apply()
        if desired.asleep and not self.asleep and not self.drains():
            await self._engine.sleep()
            self.asleep, self._for_version = True, False
        elif self.asleep and not desired.asleep:
            await self._engine.wake_up()
            self.asleep, self._for_version = False, True  # it has no weights yet
        # what a version closed is opened, and what it kept is waited for, once it has been loaded
        later = self._for_version and (self._mode is None or (self._mode == "wait" and self._drain is None))
        if self.obeyed == self._taken or later or self.drains():
            return False
        self.obeyed = self._taken
        return True

    async def close(self, mode: PauseMode) -> None:
        """Close for a version. With ``wait`` the engine is closed once it ``drains`` no more."""
        self._for_version = True
        if mode == "wait":
            self._start_drain()
            return
        self._drop_drain()
        await self._engine.pause(mode)

    async def open(self) -> None:
        """Be as ordered again, after ``close``."""
        if not self._for_version:
            return
        self._for_version = False
        waits = self._mode == "wait" and self.obeyed != self._taken
        if self._mode is None or waits or self.drains():
            await self._apply()

    def stop(self) -> None:
        """Wait for nothing any more."""
        self._drop_drain()

    async def _apply(self) -> None:
        if self._mode == "wait":
            self._start_drain()
        elif self._mode is not None:
            self._drop_drain()
            await self._engine.pause(self._mode)
        elif not self._for_version and not self.asleep:
            self._drop_drain()
            await self._engine.resume()

    def _start_drain(self) -> None:
        if not self.drains():
            self._drain = asyncio.create_task(self._engine.pause("wait"))
            self._drain.add_done_callback(lambda _: self._drained())

    def _drop_drain(self) -> None:
        drain, self._drain = self._drain, None
        if drain is not None:
            drain.cancel()
