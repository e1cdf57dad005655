"""What pytest says of each test, as a result."""

from collections.abc import Callable
from typing import Any

import pytest

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
        """What a result file says: of tests that have ended. Several may run at once, and be cut off."""
        cases = [case for name, case in self._cases.items() if name in self._ended]
        counts = {outcome: sum(case["outcome"] == outcome for case in cases) for outcome in OUTCOMES}
        return counts | {"tests": cases}
