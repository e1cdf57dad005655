"""Finds processes of a running service, and proves that none is left."""

import asyncio
import contextlib

import psutil


def descendants(title: str) -> list[psutil.Process]:
    """Processes below this one whose title starts with ``title``, e.g. ``VLLM::EngineCore``."""
    return [process for process in psutil.Process().children(recursive=True) if _title(process).startswith(title)]


def marked(name: str, value: str) -> list[psutil.Process]:
    """Processes anywhere on the machine that inherited the environment variable ``name`` with ``value``."""
    return [process for process in psutil.process_iter() if _environment(process).get(name) == value]


async def gone(name: str, value: str, within_s: float) -> list[str]:
    """Wait until no marked process is left; returns the titles of those that are after ``within_s``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while marked(name, value):
                await asyncio.sleep(0.2)
    return [_title(process) for process in marked(name, value)]


def _title(process: psutil.Process) -> str:
    for command in _quietly(process.cmdline):
        return str(command)
    return ""


def _environment(process: psutil.Process) -> dict[str, str]:
    return dict(_quietly(process.environ)) if process.pid != psutil.Process().pid else {}


def _quietly(read):  # type: ignore[no-untyped-def]
    try:
        return read()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return {}
