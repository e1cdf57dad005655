"""SIGTERM begins a drain, in every process of ours: a node that goes down, a pod that is deleted, a plain ``kill``.

Ray's own handler makes a zombie of a Serve replica: it ends the process's connection to Ray, then waits for the threads
of the event loops, which do not end. What is left answers nobody and lives on. ``signal.signal`` cannot replace it:
only the main thread may call that, and in a replica the main thread is inside Ray. ``faulthandler.register`` may be
called from any thread: its handler writes a traceback into a pipe, and a thread here takes the bytes as the signal.
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

_FOR_WORK = 2 / 3
"""Share of the time in which what runs may go on; in the rest answers are sent and engine processes end."""
_EXIT_STATUS = 128 + signal.SIGTERM


def work_s(drain_timeout_s: float) -> float:
    """How long what runs may go on, in seconds, of all that a process has."""
    return drain_timeout_s * _FOR_WORK


async def _nothing() -> None:
    """For those who have nothing to end but the calls that are open."""


class Drain:
    """The end of one process, from the moment that it is told of it.

    Serve is told by the health check, which fails from then on: it routes nothing here any more, starts another replica
    at once where resources are free, and stops this one when it has answered what is open. If Serve does not, the
    process ends by itself: ``ending_s`` after its work is done, or when the time is up.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``timeout_s``: from the signal to the end of the process. ``clock``: in seconds."""
        self.work_s = work_s(timeout_s)
        """How long what runs may go on."""
        self.ending_s = timeout_s - self.work_s
        """How long answers and engine processes have after that."""
        self._clock = clock
        self._deadline = math.inf
        self._work: Callable[[], Coroutine[object, None, None]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._told = False

    def begin_on_sigterm(self) -> None:
        """Call this first: until ``serves`` is called, nobody is served, and SIGTERM ends the process at once."""
        _on_sigterm(self._signalled)

    def serves(self, work: Callable[[], Coroutine[object, None, None]] = _nothing) -> None:
        """From now on SIGTERM begins a drain: ``work`` is run in this event loop, and ends what there is to end."""
        self._work, self._loop = work, asyncio.get_running_loop()

    def begin(self) -> None:
        """Begin now. A second time changes nothing."""
        if self.begun or self._work is None:
            return
        logger.warning(
            "SIGTERM: what runs may go on for %g s, and this process for %g s more", self.work_s, self.ending_s
        )
        self._deadline = self._clock() + self.work_s
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(self._worked)

    @property
    def begun(self) -> bool:
        """Whether this process is ending."""
        return self._deadline < math.inf

    @property
    def left_s(self) -> float:
        """Seconds that what runs may still go on; infinite before the drain has begun."""
        return max(0.0, self._deadline - self._clock())

    @property
    def done(self) -> bool:
        """Whether ``work`` is done."""
        return self._task is not None and self._task.done()

    def check_health(self) -> None:
        """Raise NotReady once the drain has begun: Serve then replaces this replica."""
        if self.begun:
            raise NotReady(f"process {os.getpid()} got SIGTERM and drains: it is to be replaced")

    def _signalled(self) -> None:
        """On the thread that waits for signals: a blocked event loop does not keep the process from ending."""
        if self._loop is None:
            _exit("before it served anybody")
        elif not self._told:
            self._told = True
            _end_in(self.work_s + self.ending_s)
            self._loop.call_soon_threadsafe(self.begin)

    def _worked(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("what a drain was to do failed", exc_info=error)
        if self._told:
            _end_in(self.ending_s)


def end_on_sigterm() -> None:
    """End this process at once when it gets SIGTERM. May be called from any thread."""
    _on_sigterm(lambda: _exit("and has nothing to finish"))


def _end_in(seconds: float) -> None:
    timer = threading.Timer(seconds, _exit, ["and nobody has stopped it since its time was up"])
    timer.daemon = True  # or it would hold up a process that ends in another way
    timer.start()


def _on_sigterm(signalled: Callable[[], None]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # the handler must never wait
    faulthandler.register(signal.SIGTERM, file=writer, all_threads=False, chain=False)

    def wait() -> None:
        while os.read(reader, 1 << 16):
            signalled()

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def end_process(status: int) -> None:
    """End this process from any thread; what it has logged is written."""
    logging.shutdown()
    os._exit(status)


def _exit(when: str) -> None:
    logger.warning("process %d got SIGTERM %s: it ends now", os.getpid(), when)
    end_process(_EXIT_STATUS)
