"""docs/models.md is what serving and reading every family has found."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.marked import write_part
from benchmarks.families.recorder import FamilyRecorder, reason_of
from benchmarks.families.table import DOCUMENT, PART, RESULT, problems, table
from tests.support import families

CASE = {"family": "a", "source": "vLLM 0.32.0, A", "refusal": None, "fp8": 0.5, "kept": ["b"]}


def test_the_table_is_up_to_date() -> None:
    assert problems(RESULT, DOCUMENT) == []


def test_a_failure_is_told_by_what_was_raised() -> None:
    account = (
        "    assert found < MEAN\nE       assert 0.5 < 0.1\n\ntests/engine/test_every_family.py:51: AssertionError"
    )
    assert reason_of(account) == "assert 0.5 < 0.1"
    assert reason_of("Timeout >200 s") == "Timeout >200 s"


def test_every_family_has_a_row() -> None:
    assert {case["family"] for case in json.loads(RESULT.read_text())["cases"]} == families.FAMILIES.keys()


def test_a_table_that_is_not_what_was_found_is_named(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"<!-- made by {PART} -->\n<!-- end of {PART} -->\n")
    write_part(page, PART, table(json.loads(RESULT.read_text())["cases"]))
    assert problems(RESULT, page) == []
    page.write_text(page.read_text().replace("100%", "99%", 1))
    assert [PART in problem for problem in problems(RESULT, page)] == [True]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"difference": 0.0314, "failure": None}, "yes: logprobs differ from fp32's by 0.031"),
        ({"difference": None, "failure": None}, "not tried"),
        ({"difference": 0.5, "failure": "assert 0.5 < 0.1"}, "**fails**: assert 0.5 < 0.1"),
        ({"difference": None, "failure": None, "refusal": "a | b"}, "no: a \\| b"),
    ],
)
def test_a_row_says_what_came_of_it(case: dict[str, Any], said: str) -> None:
    assert table([CASE | case]).splitlines()[-1] == f"| `a` | `A` | 50% | b | {said} |"


def test_a_test_that_is_skipped_is_no_case() -> None:
    recorder = FamilyRecorder()
    for family, outcome in (("gone", "skipped"), ("there", "passed")):
        properties = [("family", family), ("difference", 0.01)]
        for when in ("setup", "call", "teardown"):
            recorder.pytest_runtest_logreport(
                pytest.TestReport(
                    family,
                    ("", 0, ""),
                    {},
                    outcome if when == "call" else "passed",
                    None,
                    when,
                    user_properties=properties,
                )
            )
    assert list(recorder.cases()) == [{"family": "there", "difference": 0.01, "failure": None}]
