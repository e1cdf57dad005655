"""What vLLM's processes log as they fail reaches the replica, the process that failed first before the others."""

import logging
import multiprocessing
import subprocess
import sys

import pytest

from rollout_service.engine.child_errors import collected_errors, log_to_stderr, reason_of, tell_errors

CONTEXT = multiprocessing.get_context("spawn")  # as vLLM starts its processes


def fail(deep: bool) -> None:
    """As an engine core that starts a worker, or as that worker, with vLLM's logger."""
    tell_errors()
    tell_errors()  # vLLM calls its plug-ins more than once
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


def test_the_root_is_what_the_deepest_process_said():
    with collected_errors() as errors:
        core = CONTEXT.Process(target=fail, args=(True,), name="EngineCore")
        core.start()
        core.join()
        assert (
            errors.first()
            == "Worker_TP0: ValueError: cannot be served; caused by MemoryError: no memory for the KV cache"
        )
        assert [line.count("Worker_TP0") for line in errors.lines()] == [1, 0]


def test_a_process_that_was_killed_has_said_nothing():
    with collected_errors() as errors:
        assert errors.first() is None


def test_no_handler_where_nobody_asked():
    with collected_errors():
        assert not tell_errors(), "the replica itself is no engine process"
    asked = "from rollout_service.engine.child_errors import tell_errors; assert not tell_errors()"
    subprocess.run([sys.executable, "-c", asked], check=True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError(), "KeyError: no message"),
        (ValueError("x" * 9000), f"ValueError: {'x' * 988} … {'x' * 1000}"),
    ],
)
def test_the_reason_of_an_error(error, reason):
    assert reason_of(error) == reason


def test_a_circle_of_causes_ends():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert reason_of(first) == "ValueError: first; caused by ValueError: second"


def _log_a_line() -> None:
    log_to_stderr()
    log_to_stderr()
    logging.getLogger("vllm.worker").info("Model loading took 3 s")


def test_a_process_of_vllm_writes_its_lines_once_to_stderr(capfd):
    child = multiprocessing.get_context("spawn").Process(target=_log_a_line, name="EngineCore")
    child.start()
    child.join(60)
    log_to_stderr()  # no process of vLLM's: nothing happens
    logging.getLogger("vllm.worker").info("the replica's line")
    lines = [line for line in capfd.readouterr().err.splitlines() if "Model loading" in line or "replica's" in line]
    assert len(lines) == 1 and lines[0].endswith("EngineCore -- Model loading took 3 s")
