"""Moments too short to be hit by chance, held from outside the product: processes stopped at a state that is seen.

A process is let run in slices of a fraction of a millisecond (SIGCONT, SIGSTOP) and looked at in between, while it
stands still: at its open files, its mappings, the files of the log. Once the wanted state is there it stays stopped,
and whatever is killed then is killed in that state.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SLICE_S = 0.0003
"""Reading the small model's version takes a replica about 2 ms."""
LOOK_S = 0.0005
"""How often the log is looked at before anything is stopped."""


class MomentMissed(Exception):
    """The state was never seen, so nothing was killed in it."""


def stop_at(process: psutil.Process, reached: Callable[[], bool], timeout_s: float) -> bool:
    """Let ``process`` run in slices until ``reached``: True, and it stands still then; False, and it runs."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        _stop(process)
        if reached():
            return True
        process.send_signal(signal.SIGCONT)
        time.sleep(SLICE_S)
    return False


def resume(process: psutil.Process) -> None:
    """Let it run, if it is still there."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def _stop(process: psutil.Process) -> None:
    """Return once every thread stands still; one in a system call that writes to the disk takes a while."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    while any(_state(task) not in "TtZX" for task in tasks.iterdir()):
        time.sleep(0.0001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def wait_for(reached: Callable[[], bool], timeout_s: float) -> bool:
    """Look again and again until ``reached``; False after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if reached():
            return True
        time.sleep(LOOK_S)
    return False


def has_open(process: psutil.Process, folder: Path) -> bool:
    """Whether it has a file below ``folder`` open."""
    return any(path.startswith(f"{folder}/") for path in _open_files(process))


def has_open_memory(process: psutil.Process, name: str) -> bool:
    """Whether it has memory open that ``os.memfd_create`` made under this name."""
    return f"/memfd:{name} (deleted)" in _open_files(process)


def has_mapped(process: psutil.Process, folder: Path) -> bool:
    """Whether it has a file below ``folder`` in its memory."""
    return f"{folder}/" in Path(f"/proc/{process.pid}/maps").read_text()


def _open_files(process: psutil.Process) -> set[str]:
    return {_link(descriptor) for descriptor in Path(f"/proc/{process.pid}/fd").iterdir()}


def _link(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""
