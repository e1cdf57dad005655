"""Log lines of this package and its libraries beside Ray Serve's own: in the replica's file, and on the terminal.

``logging.config.dictConfig`` closes every handler there is, and Serve's file handler does not open again: lines are
lost, and Serve's controller, which asks each replica for its log file when it starts anew, stops all those that cannot
say (Ray 2.60.0). vLLM calls it when it is imported and uvicorn when it is configured, unless they are told not to.

With ``logging_config: {encoding: JSON}`` in the Serve config the file has JSON, these lines' ``extra`` fields in it.
"""

import logging

from rollout_service.tracing import name_the_trace

TELL_VLLM = {"VLLM_CONFIGURE_LOGGING": "0"}
"""In the environment of a process that Serve has made."""
TELL_VLLMS_OWN_PROCESSES = {"VLLM_CONFIGURE_LOGGING": "1"}
"""In that of the processes that vLLM makes, which have no other handlers."""
_OURS = ("rollout_service", "vllm", "uvicorn")


def log_with_serve() -> None:
    """In a process of Serve's: these lines from its level on, with the replica's name; otherwise only warnings show.

    ``ray.serve`` is the logger that Serve tells deployments to use.
    """
    serves = logging.getLogger("ray.serve")
    for handler in serves.handlers:
        handler.addFilter(name_the_trace)  # a second time changes nothing
    for ours in map(logging.getLogger, _OURS):
        ours.handlers, ours.propagate = list(serves.handlers), False
        ours.setLevel(serves.level)
