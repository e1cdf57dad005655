"""This package's log lines beside Ray Serve's own: in the replica's file, and where ``serve run`` shows it."""

import logging


def log_with_serve() -> None:
    """In a process of Serve's: our lines from its level on, with the replica's name; otherwise only warnings show.

    ``ray.serve`` is the logger that Serve tells deployments to use.
    """
    serves, ours = logging.getLogger("ray.serve"), logging.getLogger("rollout_service")
    ours.handlers, ours.propagate = list(serves.handlers), False
    ours.setLevel(serves.level)
