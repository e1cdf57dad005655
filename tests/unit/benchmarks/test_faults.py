"""How the fault matrix joins what it has run with the clean cases of an earlier run."""

import json
from pathlib import Path

import pytest

from benchmarks.common import results
from benchmarks.faults.__main__ import Record, kept
from benchmarks.faults.ground import Case
from benchmarks.faults.nodes import on_the_common_ground
from benchmarks.faults.outcome import Outcome

CASES = [Case(name, on_the_common_ground) for name in ("first", "second", "third")]
ORDER = [case.name for case in CASES]
EARLIER = {"date": "2026-01-02", "processor": "an older one"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return tmp_path


def earlier_run(*cases: dict[str, object]) -> None:
    file = results.path("faults")
    file.parent.mkdir()
    file.write_text(json.dumps(EARLIER | {"cases": cases}))


def test_clean_cases_that_there_still_are_are_kept() -> None:
    earlier_run(
        {"name": "first", "survived": True},
        {"name": "second", "survived": True, "stale_tokens": 1},
        {"name": "third", "survived": False},
        {"name": "removed since", "survived": True},
    )
    assert [outcome.name for outcome in kept(CASES)] == ["first"]


def test_each_case_says_when_and_on_what_it_was_run() -> None:
    newer = {"date": "2026-01-03", "processor": "another one"}
    earlier_run({"name": "first", "survived": True}, {"name": "third", "survived": True} | newer)
    record = Record(ORDER, kept(CASES), None)
    record.add(Outcome("second", survived=True))
    cases = results.cases("faults")
    assert [case["name"] for case in cases] == ORDER
    now = {"date": results.today(), "processor": results.processor()}
    assert [{key: case[key] for key in EARLIER} for case in cases] == [EARLIER, now, newer]
