"""What ``tests/engine/test_every_family.py`` records of each family."""

from collections.abc import Callable

import pytest

from benchmarks.common.results import Json


def reason_of(failure: str) -> str:
    """The last line of what was raised, out of pytest's account of a failure; without one its last line."""
    lines = failure.strip().splitlines()
    return next((line[1:].strip() for line in reversed(lines) if line.startswith("E ")), lines[-1])


class FamilyRecorder:
    """A pytest plugin that keeps the properties and the outcome of each test that names its family.

    ``keep`` is called with each case as soon as its test is over: a run of many families takes long.
    """

    def __init__(self, keep: Callable[[Json], None]) -> None:
        self._keep = keep
        self.seen: set[str] = set()
        """Families of all tests, skipped ones too."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """pytest's hook: set-up, call and tear-down of one test have each a report."""
        recorded = dict(report.user_properties)
        if "family" not in recorded or report.when != "call":
            return
        self.seen.add(str(recorded["family"]))
        expected = getattr(report, "wasxfail", None)  # pytest calls a failure that was expected skipped
        if report.skipped and expected is None:
            return
        failed = report.failed or report.skipped
        failure = expected or reason_of(report.longreprtext)[:300] if failed else None
        self._keep({"family": recorded["family"], "difference": recorded.get("difference"), "failure": failure})
