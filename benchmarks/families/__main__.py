"""What becomes FP8 of every family of models, and what came of serving each by a small engine.

    python -m benchmarks.families               an engine of each: half a minute a family
    python -m benchmarks.families -- -k gemma
    python -m benchmarks.families --read        what vLLM's classes say alone; no engine is started

Runs ``tests/engine/test_every_family.py``. Writes benchmarks/results/<machine>/models.json and the table of
docs/models.md. Families that are not tested now keep what came of them before. Exits as pytest does.
"""

from collections.abc import Callable
from typing import Annotated

import pytest
import typer

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.results import Json
from benchmarks.families.table import write_tables

TESTS = "tests/engine/test_every_family.py"
UNREAD: Json = {"refusal": None, "source": None, "fp8": None, "kept": []}
"""What is known of a family before vLLM's class of it is read."""


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


def main(
    read: Annotated[bool, typer.Option("--read", help="Start no engine.")] = False,
    options: Annotated[list[str] | None, typer.Argument(help="Of pytest, such as -v, or -k gemma.")] = None,
) -> None:
    """Serve and read them; write the result and the table."""
    from benchmarks.families.reading import readings
    from tests.support.families import FAMILIES

    def keep(case: Json) -> None:
        read_before = {key: _kept(case["family"]).get(key, value) for key, value in UNREAD.items()}
        _add(read_before | case)

    recorder = FamilyRecorder(keep)
    code = 0 if read else pytest.main([TESTS, "-m", "slow", *(options or [])], plugins=[recorder])
    of_engine = {"difference": None, "failure": None}
    for case in readings(sorted(FAMILIES if read else recorder.seen)):
        _add(of_engine | _kept(case["family"]) | case)
    write_tables()
    raise typer.Exit(int(code))


def _kept(family: str) -> Json:
    """What the result says of it; nothing if it has no case there."""
    return next((case for case in results.cases("models") if case["family"] == family), {})


def _add(case: Json) -> None:
    results.add("models", [case], ("family",))


if __name__ == "__main__":
    run(main)
