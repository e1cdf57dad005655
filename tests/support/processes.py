"""Finds processes of a running service, and proves that none is left."""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Any

import psutil

MARK = "ROLLOUT_SERVICE_MARK"
"""An environment variable: whoever starts a service sets it to a value of its own, and every process inherits it."""
GONE_S = 60.0
"""Processes of a service that has ended are gone within this time."""


def descendants(title: str) -> list[psutil.Process]:
    """Processes below this one whose title starts with ``title``, e.g. ``VLLM::EngineCore``."""
    return [process for process, known in titled() if known.startswith(title)]


def titled() -> list[tuple[psutil.Process, str]]:
    """Every process below this one with its title; "" if it has ended meanwhile."""
    return [(process, _title(process)) for process in psutil.Process().children(recursive=True)]


def marked(mark: str) -> list[psutil.Process]:
    """Processes anywhere on the machine that inherited ``MARK`` with that value."""
    return [process for process in psutil.process_iter() if _environment(process).get(MARK) == mark]


def titles(mark: str) -> list[str]:
    """Of the marked processes."""
    return [_title(process) for process in marked(mark)]


async def gone(mark: str, *, within_s: float = GONE_S, besides: Collection[str] = ()) -> list[str]:
    """Wait until no marked process is left but those titled as one of ``besides``.

    Returns the titles of those that are left after ``within_s``.
    """

    def left() -> list[str]:
        return [title for title in titles(mark) if title not in besides]

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while left():
                await asyncio.sleep(0.2)
    return left()


def alive(process: psutil.Process) -> bool:
    """Whether it runs, or stands still: not whether somebody has yet to take note of its end."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    for command in _quietly(process.cmdline):
        return str(command)
    return ""


def _environment(process: psutil.Process) -> dict[str, str]:
    return dict(_quietly(process.environ)) if process.pid != psutil.Process().pid else {}


def _quietly(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return {}
