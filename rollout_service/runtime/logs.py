"""Log lines of this package and its libraries beside Ray Serve's own: in the replica's file, and on the terminal.

``logging.config.dictConfig`` closes all existing handlers, and Serve's file handler does not open again, so lines are
lost. Serve's controller asks each replica for its log file when it restarts, and stops all replicas that do not answer
(Ray 2.60.0). vLLM calls ``dictConfig`` when it is imported, and uvicorn when it is configured, unless told not to.

With ``logging_config: {encoding: JSON}`` in the Serve config the file contains JSON, with these lines' ``extra``
fields.
"""

import logging
import time
from collections.abc import Callable

from rollout_service.errors import RolloutServiceError
from rollout_service.tracing import name_the_trace

TELL_VLLM = {"VLLM_CONFIGURE_LOGGING": "0"}
"""Environment of a process that Serve has started, so that vLLM does not configure logging."""
_OURS = ("rollout_service", "vllm", "uvicorn")
QUIET_S = 10.0
"""Time in seconds in which several calls with the same class of error are logged once."""


class ShortRefusals:
    """A filter for Serve's logger, which logs a traceback for each call that raises.

    An error of ``errors.py`` is an answer: its caller gets it, and the log has one line without a traceback.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: in seconds."""
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def __call__(self, record: logging.LogRecord) -> bool:
        """Shorten a line about an error, and drop it if one of its class was logged just before."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, RolloutServiceError):
            return True
        kind, now = type(error).__name__, self._clock()
        if now - self._logged_at.get(kind, float("-inf")) < QUIET_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._logged_at[kind] = now
        more = self._left_out.pop(kind, 0)
        since = f" ({more} more since the last such line)" if more else ""
        record.msg, record.args, record.exc_info = f"{kind}: {' '.join(str(error).split())}{since}", (), None
        record.exc_text = None
        if error.http_status < 500 or error.retry_after_s is not None:
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return True


_short_refusals = ShortRefusals()


def log_with_serve() -> None:
    """Log with Serve's handlers and level, with the replica's name; otherwise only warnings would show. For Serve's
    processes.

    ``ray.serve`` is the logger that Serve recommends to deployments.
    """
    serves = logging.getLogger("ray.serve")
    serves.addFilter(_short_refusals)  # adding it again has no effect
    for handler in serves.handlers:
        handler.addFilter(name_the_trace)  # adding it again has no effect
    for ours in map(logging.getLogger, _OURS):
        ours.handlers, ours.propagate = list(serves.handlers), False
        ours.setLevel(serves.level)
