"""Processes of vLLM: they end with their replica, show what they log, and report why they could not start.

vLLM's engine core and its workers log their fatal errors, but tell the replica only that they ended. The replica
therefore names a file in an environment variable that they inherit. In each process, vLLM's plug-in writes the errors
of vLLM's logger there. A worker fails before the core, so the first line has the root cause.
"""

import atexit
import ctypes
import json
import logging
import multiprocessing
import os
import platform
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_service.errors import shorten
from rollout_service.runtime.drain import end_process

_VARIABLE = "ROLLOUT_SERVICE_ENGINE_ERRORS"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> bool:
    """Let the kernel kill this process when its parent dies, however it ends. Returns False unless this is a
    ``multiprocessing`` child.

    vLLM stops its engine process on request, but a killed replica cannot send a request.
    """
    if platform.system() != "Linux" or multiprocessing.parent_process() is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return True


def skip_finalization() -> bool:
    """Let this process end as a forked one does: without Python's last garbage collection. Returns False unless this is
    a ``multiprocessing`` child, whose exit status becomes 1."""
    if multiprocessing.parent_process() is None:
        return False
    # a replica waits for its engine and each worker in turn, and the collection takes each of them 2.5 s
    atexit.register(end_process, 1)
    return True


@contextmanager
def collected_errors() -> Iterator[Callable[[], list[str]]]:
    """Let processes started inside the block write their errors to a new file.

    Yields a function that returns the error of each process, in the order of failure. The list is empty after a kill.
    """
    with tempfile.NamedTemporaryFile(prefix="rollout-service-engine-", suffix=".jsonl") as file:
        # the only channel that reaches vLLM's processes before they have a configuration
        os.environ[_VARIABLE] = file.name  # noqa: TID251

        def errors() -> list[str]:
            said = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
            return [f"{one['process']}: {one['reason']}" for one in said]

        try:
            yield errors
        finally:
            del os.environ[_VARIABLE]  # noqa: TID251


def tell_errors() -> bool:
    """In an engine's process: write the exceptions that vLLM logs to the replica's file. Return False if there is no
    file."""
    file = os.environ.get(_VARIABLE)  # noqa: TID251
    if file is None or multiprocessing.parent_process() is None:
        return False
    vllm = logging.getLogger("vllm")
    if not any(isinstance(handler, _Errors) for handler in vllm.handlers):
        vllm.addHandler(_Errors(Path(file)))
    return True


class _Errors(logging.Handler):
    """Writes the exception of a log record as a line of JSON."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not self._file.exists():  # the replica has finished starting the engine, or given it up
            return
        line = json.dumps({"process": multiprocessing.current_process().name, "reason": reason_of(error)})
        with self._file.open("a") as stream:
            stream.write(line + "\n")  # a single write, so that lines of several processes do not mix


def reason_of(error: BaseException) -> str:
    """Return an error followed by its chain of causes, the deepest last."""
    chain: dict[int, str] = {}
    found: BaseException | None = error
    while found is not None and id(found) not in chain:
        chain[id(found)] = f"{type(found).__name__}: {str(found) or 'no message'}"
        found = found.__cause__
    return shorten("; caused by ".join(chain.values()))


def log_to_stderr() -> None:
    """In a process created by vLLM: write log lines to standard error, which Ray shows.

    vLLM itself does not, because its processes inherit the replica's logging setup without handlers. May be called
    again.
    """
    if multiprocessing.parent_process() is None:
        return
    for ours in map(logging.getLogger, ("rollout_service", "vllm")):
        if any(isinstance(handler, logging.StreamHandler) for handler in ours.handlers):
            continue
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(processName)s -- %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False
