"""Undocumented names of Ray that this package uses. Nothing here replaces code of Ray."""

import asyncio
import time

from rollout_service.compat import require_release

require_release(("ray",), "2.60")  # before the imports below, whose errors would not say the reason

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.request_router.replica_wrapper import ReplicaSelection
from ray.serve.config import HTTPOptions

ANSWERS_S = 2.0
"""Timeout in seconds for Serve's controller. A controller that answers later is too busy for health checks."""
_CALL_S = 5.0
"""Timeout in seconds of one call of the controller, other than ``controller_answered``."""
_SHUTDOWN_S = 30.0
"""Time in seconds that ``serve.shutdown`` waits for the controller to answer, and to end."""
_POLL_S = 0.1


async def controller_answered(within_s: float, *, if_gone: bool = False) -> bool:
    """Return True if Serve's controller answers a call in time. ``if_gone``: returned if it has died, or is starting,
    or Serve is shutting down."""
    try:
        controller = serve_controller()  # blocks: not part of the controller's time
        async with asyncio.timeout(within_s):
            await controller.check_alive.remote()
    except TimeoutError:
        return False
    except (RayError, ValueError):
        return if_gone
    return True


async def http_options() -> HTTPOptions:
    """Return the address of Serve's proxies, once the controller answers."""
    while True:
        try:
            async with asyncio.timeout(_CALL_S):
                options: HTTPOptions = await serve_controller().get_http_config.remote()
                return options
        except (TimeoutError, RayError, ValueError):  # it has died, is restarting, or hangs
            await asyncio.sleep(_POLL_S)


def restart_controller() -> None:
    """Kill Serve's controller. Ray restarts it, and it takes over the existing replicas."""
    ray.kill(serve_controller(), no_restart=False)


def serve_controller() -> ActorHandle[object]:
    """Return Serve's controller. Raises ValueError if Serve does not run."""
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def shut_down_serve(controller: ActorHandle[object] | None) -> None:
    """Shut Serve down like ``serve.shutdown``, without Ray's warning that a task failed because the controller was
    killed.

    ``serve.shutdown`` waits in a call of the controller until the controller kills itself, and Ray then warns that this
    call has failed. Here no call is open at that time. ``controller``: None if there may be none.
    """
    if controller is None or not _end_controller(controller):
        serve.shutdown()  # if it has ended, this would also report that it died


def _end_controller(controller: ActorHandle[object]) -> bool:
    """Let Serve's controller end everything, and then itself.

    Return False if it has not ended in time, or is unreachable, since the cluster is ending.
    """
    try:
        ray.get(controller.graceful_shutdown.remote(wait=False), timeout=_CALL_S)
        deadline = time.monotonic() + _SHUTDOWN_S
        while time.monotonic() < deadline:
            serve_controller()
            time.sleep(_POLL_S)
    except ValueError:  # there is none any more
        return True
    except RayError:
        pass
    return False


def continue_trace(selection: ReplicaSelection, trace: dict[str, str]) -> None:
    """Have a chosen replica continue the trace of these W3C headers.

    Serve (2.60.0) hands the trace on in ``remote`` calls only.
    """
    selection._request_metadata.tracing_context = trace
