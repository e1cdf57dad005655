"""Progress lines while a service starts: what it waits for, and for how long."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
from ray import serve

from rollout_service.protocol.fleet import Fleet

LOOK_S = 1.0
"""Time in seconds between two looks."""
REPEAT_S = 30.0
"""Time in seconds after which an unchanged line is repeated."""
_ANSWER_S = 2.0


@contextmanager
def progress_lines(
    look: Callable[[], str], say: Callable[[str], object], *, look_s: float = LOOK_S, repeat_s: float = REPEAT_S
) -> Iterator[None]:
    """Call ``say`` with the result of ``look`` after each change and every ``repeat_s``, until the block ends."""
    started, ended = time.monotonic(), threading.Event()

    def report() -> None:
        last, said_s = "", 0.0
        while not ended.wait(look_s):
            waits_for, now_s = look(), time.monotonic() - started
            if waits_for and (waits_for != last or now_s - said_s >= repeat_s):
                say(f"{now_s:.0f} s: {waits_for}")
                last, said_s = waits_for, now_s

    reporting = threading.Thread(target=report, name="start-progress", daemon=True)
    reporting.start()
    try:
        yield
    finally:
        ended.set()
        reporting.join(_ANSWER_S)


def look_at_start(url: str, application: str) -> str:
    """Return what the service at ``url`` waits for: by Serve's status, and by its fleet once a gateway answers."""
    app = serve.status().applications.get(application)
    if app is None:
        return "Ray Serve starts"
    starting = sorted(name for name, deployment in app.deployments.items() if deployment.status != "HEALTHY")
    if "gateway" not in starting:  # before, Serve's proxy would hold the request, and log that it was given up
        with suppress(httpx.TransportError):
            reply = httpx.get(f"{url}/v1/fleet", timeout=_ANSWER_S, verify=False)  # no secret is sent or read
            if reply.status_code == httpx.codes.OK:
                return engines_wait_for(Fleet.model_validate_json(reply.content))
    return f"starting: {', '.join(starting)}" if starting else ""


def engines_wait_for(fleet: Fleet) -> str:
    """Return what the first engine that does not serve waits for; "" if all serve."""
    if not fleet.replicas:
        return "the engine's process starts"
    waiting = [replica for replica in fleet.replicas if replica.state not in ("ready", "asleep")]
    if not waiting:
        return ""
    first, of = waiting[0], "" if len(fleet.replicas) == 1 else f" ({len(waiting)} of {len(fleet.replicas)} engines)"
    if first.error is not None:
        return f"{first.error}{of}"
    if first.state == "starting":
        return f"vLLM starts{of}; on a host's first start of a model it compiles for minutes"
    return f"the engine loads version {fleet.latest_version}{of}"
