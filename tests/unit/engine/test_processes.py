"""What vLLM's processes log as they fail reaches the replica, and they end without finalization."""

import logging
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

from rollout_service.engine.processes import (
    collected_errors,
    log_to_stderr,
    reason_of,
    skip_finalization,
    tell_errors,
)

CONTEXT = multiprocessing.get_context("spawn")  # as vLLM starts its processes


def fail(deep: bool) -> None:
    """As an engine core that starts a worker, or as that worker, with vLLM's logger."""
    for _ in range(2):  # vLLM calls its plug-ins more than once
        tell_errors()
        log_to_stderr()
    logging.getLogger("vllm.engine").error("no exception, only words")
    try:
        if deep:
            worker = CONTEXT.Process(target=fail, args=(False,), name="Worker_TP0")
            worker.start()
            worker.join()
            raise RuntimeError("a worker failed, see above")
        try:
            raise MemoryError("no memory for the KV cache")
        except MemoryError as error:
            raise ValueError("cannot be served") from error
    except (RuntimeError, ValueError):
        logging.getLogger("vllm.engine").exception("failed to start")


def test_the_first_error_is_what_the_deepest_process_said(capfd):
    with collected_errors() as errors:
        assert errors() == []  # as of a process that was killed
        assert not tell_errors(), "the replica itself is no engine process"
        core = CONTEXT.Process(target=fail, args=(True,), name="EngineCore")
        core.start()
        core.join()
        first, second = errors()
    assert first == "Worker_TP0: ValueError: cannot be served; caused by MemoryError: no memory for the KV cache"
    assert second.startswith("EngineCore: RuntimeError: a worker failed")
    log_to_stderr()  # no process of vLLM's: nothing happens
    logging.getLogger("vllm.worker").info("only words of the replica")
    words = [line for line in capfd.readouterr().err.splitlines() if line.endswith("only words")]
    assert [line.split(" -- ")[0].split()[-1] for line in words] == ["EngineCore", "Worker_TP0"]


def test_no_handler_where_nobody_asked():
    asked = "from rollout_service.engine.processes import tell_errors; assert not tell_errors()"
    subprocess.run([sys.executable, "-c", asked], check=True)


def test_the_reason_of_an_error_is_its_chain_shortened():
    assert reason_of(KeyError()) == "KeyError: no message"
    assert reason_of(ValueError("x" * 9000)) == f"ValueError: {'x' * 986} … {'x' * 998}"
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert reason_of(first) == "ValueError: first; caused by ValueError: second"


class Finalized:
    """Writes when Python destroys it: at the latest when the interpreter is finalized."""

    def __init__(self, file: int) -> None:
        self._file, self._write = file, os.write

    def __del__(self) -> None:
        self._write(self._file, b"finalized")


KEPT: list[Finalized] = []
"""Lives as long as the interpreter."""


def work(connection: Connection, skips: bool) -> None:
    if skips:
        assert skip_finalization()
    KEPT.append(Finalized(os.dup(connection.fileno())))
    os.write(connection.fileno(), b"worked ")


@pytest.mark.parametrize(("skips", "said"), [(False, b"worked finalized"), (True, b"worked ")])
def test_an_engine_process_ends_without_finalization(skips, said):
    assert not skip_finalization()  # the replica itself is finalized
    read, write = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=work, args=(write, skips))
    process.start()
    write.close()
    process.join()
    assert os.read(read.fileno(), 100) == said
