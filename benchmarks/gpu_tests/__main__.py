"""Run tests on a GPU and keep what came of each.

    python -m benchmarks.gpu_tests tests/gpu
    python -m benchmarks.gpu_tests --name tests_gpu_tp2 tests/gpu/test_tensor_parallel.py
    python -m benchmarks.gpu_tests --name tests_gpu_channel -- tests/gpu/test_engine.py -k "channels and fp8_channel"

Writes benchmarks/results/<GPU>/<name>.json after every test, whatever the number of GPUs: a host may be taken
back at any moment. Exits as pytest does.
"""

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import typer

from benchmarks.common import results
from benchmarks.common.command import run

OUTCOMES = ("passed", "failed", "skipped")


class Recorder:
    """A pytest plugin: hands on what came of the tests so far, after each."""

    def __init__(self, write: Callable[[dict[str, Any]], object]) -> None:
        self._write = write
        self._cases: dict[str, dict[str, Any]] = {}
        self._ended: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """pytest's hook: set-up, call and tear-down of one test have each a report."""
        case = self._cases.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        case["seconds"] = round(case["seconds"] + report.duration, 1)
        case.update(report.user_properties)
        if report.outcome != "passed":
            case["outcome"] = report.outcome
            # a test that is skipped has its file's path on this machine, the line, and the reason
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            case["why"] = str(why)[-2000:]
        if report.when == "teardown":
            self._ended.add(report.nodeid)
            self._write(self.content())

    def content(self) -> dict[str, Any]:
        """Return the result of the tests that have ended. Several may run at once, and be cut off."""
        cases = [case for name, case in self._cases.items() if name in self._ended]
        counts = {outcome: sum(case["outcome"] == outcome for case in cases) for outcome in OUTCOMES}
        return counts | {"tests": cases}


def main(
    tests: Annotated[list[str], typer.Argument(help="Files or tests, as for pytest.")],
    name: Annotated[str, typer.Option(help="Of the result file.")] = "tests_gpu",
) -> None:
    """Run them in this process, and write the result."""

    def write(content: dict[str, Any]) -> None:
        results.write(name, content, machine_name=results.gpu())

    raise typer.Exit(pytest.main(["-v", *tests], plugins=[Recorder(write)]))


if __name__ == "__main__":
    run(main)
