"""Serve's status messages for deployments that do not run, for failures before our own processes can report them."""

import re

from ray import serve

from rollout_service.errors import shorten

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
