"""Looks after Serve's controller, which nobody else does.

Ray starts a controller anew when its process has died. One that got SIGTERM lives on and answers no call (Ray 2.60.0):
no replica can start any more, and none is replaced.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rollout_service.compat import ray_internals

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
PATIENCE_S = 15.0
"""Longer than a controller on busy cores takes to answer; what runs goes on without one."""


async def watch_controller(
    answers: Callable[[float], Awaitable[bool]] = ray_internals.controller_answers,
    restart: Callable[[], None] = ray_internals.restart_controller,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Restart a controller that does not answer, without end. ``answers``: whether it does, within so many seconds."""
    while True:
        await sleep(PERIOD_S)
        if not await answers(PATIENCE_S):
            logger.error("Ray Serve's controller has not answered for %g s: it is started anew", PATIENCE_S)
            try:
                restart()
            except ValueError:  # there is none: Serve is being shut down
                logger.info("there is no controller to restart")
