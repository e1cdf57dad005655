"""Serve itself: why a deployment does not run, before our own processes can report it, and a controller that hangs."""

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable

from ray import serve

from rollout_service.compat import ray_internals
from rollout_service.errors import shorten

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
PATIENCE_S = 15.0
"""Timeout in seconds, longer than a controller on busy cores takes to answer. Running replicas work without a
controller."""
_FRAME = re.compile(r'\s+File ".*", line \d+')
_IN_FRAME = "    "


def not_running(application: str) -> dict[str, str]:
    """Return deployment → reason why it does not run, abbreviated; "" → reason why the application could not be
    created.

    Asks Serve's controller, and blocks until it answers.
    """
    app = serve.status().applications.get(application)
    if app is None:
        return {}
    found = {
        name: in_short(deployment.message)
        for name, deployment in app.deployments.items()
        if deployment.status != "HEALTHY" and deployment.message
    }
    if not found and app.status == "DEPLOY_FAILED" and app.message:
        found[""] = in_short(app.message)
    return found


class ServeMessages:
    """The messages of ``not_running``, for all requests of a process."""

    MAX_AGE_S = 1.0
    """Time in seconds after which ``ask`` is called again."""

    def __init__(self, ask: Callable[[], dict[str, str]], clock: Callable[[], float] = time.monotonic) -> None:
        """``ask``: takes the controller and this process 60 ms of a core. ``clock``: in seconds."""
        self._ask, self._clock, self._lock = ask, clock, asyncio.Lock()
        self._said: dict[str, str] = {}
        self._asked_at = -math.inf

    async def read(self) -> dict[str, str]:
        """Return the messages, at most ``MAX_AGE_S`` old."""
        async with self._lock:
            if self._clock() - self._asked_at > self.MAX_AGE_S:
                self._said = await asyncio.to_thread(self._ask)
                self._asked_at = self._clock()
            return self._said


def in_short(message: str) -> str:
    """Return Serve's message without its traceback: the text before it, and the error at the end."""
    head, _, error = message.partition("Error:\n")
    lines = error.splitlines()
    frames = [i for i, line in enumerate(lines) if _FRAME.match(line)]
    if frames:
        lines = lines[frames[-1] + 1 :]
        while lines and lines[0].startswith(_IN_FRAME):
            lines.pop(0)
    return shorten(" ".join([*head.split(), *" ".join(lines).split()]))


async def watch_controller(
    answers: Callable[..., Awaitable[bool]] = ray_internals.controller_answered,
    restart: Callable[[], None] = ray_internals.restart_controller,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Restart Serve's controller if it does not answer, in an endless loop.

    Ray restarts a controller whose process has died. One that got SIGTERM stays alive and answers no call (Ray 2.60.0):
    no replica can start any more, and none is replaced. ``answers``: ``ray_internals.controller_answered``, called with
    ``if_gone=True``: a restart does not help a controller that has died or is starting.
    """
    while True:
        await sleep(PERIOD_S)
        if not await answers(PATIENCE_S, if_gone=True):
            logger.error("Ray Serve's controller has not answered for %g s: it is started anew", PATIENCE_S)
            try:
                restart()
            except ValueError:  # Serve is being shut down
                logger.info("there is no controller to restart")
