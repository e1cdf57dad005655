"""Restart Serve's controller if it does not answer.

Ray restarts a controller whose process has died. A controller that got SIGTERM stays alive and answers no call (Ray
2.60.0): no replica can start any more, and none is replaced.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rollout_service.compat import ray_internals

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
PATIENCE_S = 15.0
"""Timeout in seconds, longer than a controller on busy cores takes to answer. Running replicas work without a
controller."""


async def watch_controller(
    answers: Callable[[float], Awaitable[bool]] = ray_internals.controller_answers,
    restart: Callable[[], None] = ray_internals.restart_controller,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Restart a controller that does not answer, in an endless loop. ``answers``: returns True if it does within that
    many seconds."""
    while True:
        await sleep(PERIOD_S)
        if not await answers(PATIENCE_S):
            logger.error("Ray Serve's controller has not answered for %g s: it is started anew", PATIENCE_S)
            try:
                restart()
            except ValueError:  # Serve is being shut down
                logger.info("there is no controller to restart")
