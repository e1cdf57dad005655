"""Why an engine's processes could not start, told to the replica that started them.

vLLM's engine core and its workers log what ended them, and the replica is told only that they ended. So the replica
names a file in an environment variable, which they inherit, and in each of them vLLM's plug-in has the errors of
vLLM's logger written there. A worker fails first, and the core because of it: the first line is the root.
"""

import json
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_service.errors import shortened

_VARIABLE = "ROLLOUT_SERVICE_ENGINE_ERRORS"


class EngineErrors:
    """What the processes of one engine said, as they could not start."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def first(self) -> str | None:
        """The process that failed first, and why; None if none said anything: it may have been killed."""
        return next(iter(self.lines()), None)

    def lines(self) -> list[str]:
        """What each said, in the order in which they failed."""
        said = [json.loads(line) for line in self._file.read_text().splitlines()]
        return [f"{one['process']}: {one['reason']}" for one in said]


@contextmanager
def collected_errors() -> Iterator[EngineErrors]:
    """Have the processes that are started inside the block write their errors to a file of their own."""
    with tempfile.NamedTemporaryFile(prefix="rollout-service-engine-", suffix=".jsonl") as file:
        # no setting, but the one thing that reaches vLLM's processes before they have a configuration
        os.environ[_VARIABLE] = file.name  # noqa: TID251
        try:
            yield EngineErrors(Path(file.name))
        finally:
            del os.environ[_VARIABLE]  # noqa: TID251


def tell_errors() -> bool:
    """In an engine's process: write what vLLM logs as exceptions to the replica's file. False where nobody asked."""
    file = os.environ.get(_VARIABLE)  # noqa: TID251
    if file is None or multiprocessing.parent_process() is None:
        return False
    vllm = logging.getLogger("vllm")
    if not any(isinstance(handler, _Errors) for handler in vllm.handlers):
        vllm.addHandler(_Errors(Path(file)))
    return True


class _Errors(logging.Handler):
    """Writes the exception of a record as a line of JSON."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not self._file.exists():  # the replica has its engine, or has given it up
            return
        line = json.dumps({"process": multiprocessing.current_process().name, "reason": reason_of(error)})
        with self._file.open("a") as stream:
            stream.write(line + "\n")  # one write, so that processes do not mix their lines


def reason_of(error: BaseException) -> str:
    """An error and, where it names one, what caused it: the deepest last."""
    chain: dict[int, str] = {}
    found: BaseException | None = error
    while found is not None and id(found) not in chain:
        chain[id(found)] = f"{type(found).__name__}: {str(found) or 'no message'}"
        found = found.__cause__
    return shortened("; caused by ".join(chain.values()))


def log_to_stderr() -> None:
    """In a process that vLLM has made: write its lines and ours to standard error, which Ray shows.

    vLLM itself does not: its processes take over that the replica's leaves handlers alone. Safe to call again.
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
