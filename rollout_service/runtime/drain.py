"""Drain a process at SIGTERM: a node that goes down, a pod that is deleted, a plain ``kill``.

Ray's own handler turns a Serve replica into a zombie: it closes the process's connection to Ray, then waits for the
event loops' threads, which do not end. The process answers no call and lives on. ``signal.signal`` cannot replace the
handler: only the main thread may call it, and in a replica that thread is inside Ray. ``faulthandler.register`` may be
called from any thread. Its handler writes a traceback into a pipe, and a thread here treats the bytes as the signal.
"""

import asyncio
import faulthandler
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine

from rollout_service.errors import NotReady

logger = logging.getLogger(__name__)

_WORK_SHARE = 2 / 3
"""Share of the drain's time in which work may continue; in the rest, replies are sent and engine processes end."""
_EXIT_STATUS = 128 + signal.SIGTERM


async def _do_nothing() -> None:
    """Default work of a drain: nothing but the open calls."""


class Drain:
    """The drain of one process, from the signal to its end.

    The health check fails from then on, which tells Serve. Serve routes nothing here any more, starts another replica
    at once if resources are free, and stops this one when it has answered its open calls. If Serve does not, the
    process ends by itself: ``ending_s`` after its work is done, or when the time is up.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``timeout_s``: time from the signal to the end of the process. ``clock``: in seconds."""
        self.work_s = timeout_s * _WORK_SHARE
        """Time in seconds that running work may continue."""
        self.ending_s = timeout_s - self.work_s
        """Time in seconds after that for replies and engine processes."""
        self._clock = clock
        self._deadline = math.inf
        self._work: Callable[[], Coroutine[object, None, None]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._was_signalled = False

    def begin_on_sigterm(self) -> None:
        """Handle SIGTERM; call it first. Until ``serves`` is called, SIGTERM ends the process at once."""
        _on_sigterm(self._handle_signal)

    def serves(self, work: Callable[[], Coroutine[object, None, None]] = _do_nothing) -> None:
        """Let SIGTERM begin a drain from now on: ``work`` runs in this event loop, and ends the process's work."""
        self._work, self._loop = work, asyncio.get_running_loop()

    def begin(self) -> None:
        """Begin the drain now. Calling it again has no effect."""
        if self.begun or self._work is None:
            return
        logger.warning(
            "SIGTERM: running work may continue for %g s; the process ends %g s later", self.work_s, self.ending_s
        )
        self._deadline = self._clock() + self.work_s
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(self._end_after_work)

    @property
    def begun(self) -> bool:
        """Return True if this process is ending."""
        return self._deadline < math.inf

    @property
    def left_s(self) -> float:
        """Return the time in seconds that running work may still continue; infinite before the drain."""
        return max(0.0, self._deadline - self._clock())

    @property
    def done(self) -> bool:
        """Return True if ``work`` is done."""
        return self._task is not None and self._task.done()

    def check_health(self) -> None:
        """Raise NotReady once the drain has begun: Serve then replaces this replica."""
        if self.begun:
            raise NotReady(f"process {os.getpid()} is draining after SIGTERM: Serve replaces it")

    def _handle_signal(self) -> None:
        """Handle the signal, on its own thread: a blocked event loop must not keep the process from ending."""
        if self._loop is None:
            _exit("while it started")
        elif not self._was_signalled:
            self._was_signalled = True
            _end_in(self.work_s + self.ending_s)
            self._loop.call_soon_threadsafe(self.begin)

    def _end_after_work(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the drain's work failed; the process ends anyway", exc_info=error)
        if self._was_signalled:
            _end_in(self.ending_s)


def end_on_sigterm() -> None:
    """End this process at once when it gets SIGTERM. May be called from any thread."""
    _on_sigterm(lambda: _exit("with nothing to finish"))


def _end_in(seconds: float) -> None:
    timer = threading.Timer(seconds, _exit, ["and was not stopped before its drain ended"])
    timer.daemon = True  # otherwise it would delay a process that ends in another way
    timer.start()


def _on_sigterm(signalled: Callable[[], None]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # the handler must never block
    faulthandler.register(signal.SIGTERM, file=writer, all_threads=False, chain=False)

    def wait() -> None:
        while os.read(reader, 1 << 16):
            signalled()

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def end_process(status: int) -> None:
    """Flush logs and end this process; may be called from any thread."""
    logging.shutdown()
    os._exit(status)


def _exit(when: str) -> None:
    logger.warning("process %d ends now: it got SIGTERM %s", os.getpid(), when)
    end_process(_EXIT_STATUS)
