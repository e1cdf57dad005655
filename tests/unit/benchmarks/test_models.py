"""docs/models.md is what serving and reading every family has found."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.results import Json
from benchmarks.families.recorder import FamilyRecorder, reason_of
from benchmarks.families.table import DOCUMENT, PART, PUBLISHED_PART, WRITE, on_cpu, problems, published_table, table
from tests.support import families

CASE = {"family": "a", "source": "vLLM 0.32.0, A", "refusal": None, "fp8": 0.5, "kept": ["b"]}


def test_the_table_is_up_to_date() -> None:
    assert problems(DOCUMENT) == []


def test_a_failure_is_told_by_what_was_raised() -> None:
    account = (
        "    assert found < MEAN\nE       assert 0.5 < 0.1\n\ntests/engine/test_every_family.py:51: AssertionError"
    )
    assert reason_of(account) == "assert 0.5 < 0.1"
    assert reason_of("Timeout >200 s") == "Timeout >200 s"


def test_every_family_has_a_row() -> None:
    assert {case["family"] for case in on_cpu()} == families.FAMILIES.keys()


@pytest.mark.parametrize("part", [PART, PUBLISHED_PART])
def test_a_table_that_is_not_what_was_found_is_named(tmp_path: Path, part: str) -> None:
    page = tmp_path / "models.md"
    text = DOCUMENT.read_text()
    made = text.index(f"<!-- made by {part} -->")
    page.write_text(text[:made] + text[made:].replace("100%", "99%", 1))
    assert [WRITE in problem for problem in problems(page)] == [True]


def test_expert_parallelism_is_named_where_it_makes_more_fp8() -> None:
    def way(gpus: int, fp8: float, *, experts: bool = False, refusal: str | None = None) -> Json:
        return {"gpus": gpus, "fp8": fp8, "expert_parallel": experts, "refusal": refusal}

    ways = [way(1, 0.999), way(2, 1.0), way(2, 0.999, experts=True), way(4, 0.03), way(4, 0.991, experts=True)]
    refused = way(8, 0.0, refusal="28 heads: no")
    rows = published_table([{"model": "a", "parameters": 7.61e9, "ways": [*ways, refused]}]).splitlines()
    assert rows[0] == "| | parameters | 1 GPU | 2 GPUs | 4 GPUs | 8 GPUs |"
    assert rows[-1] == "| a | 7.6 B | 100% | 100% | 99%, `expert_parallel` | no: 28 heads |"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"difference": 0.0314, "failure": None}, "yes: 0.031"),
        ({"difference": None, "failure": None}, "not tried"),
        ({"difference": 0.5, "failure": "assert 0.5 < 0.1"}, "**fails**: assert 0.5 < 0.1"),
        ({"difference": None, "failure": None, "refusal": "a | b"}, "no: a \\| b"),
    ],
)
def test_a_row_says_what_came_of_it(case: dict[str, Any], said: str) -> None:
    served = CASE | {"difference": 0.5, "failure": None}
    for cpu_cases, gpu_cases, last in (
        ([CASE | case], [], f"{said} | not tried"),
        ([served], [CASE | case], f"yes: 0.500 | {said}"),
    ):
        assert table(cpu_cases, gpu_cases).splitlines()[-1] == f"| `a` | `A` | 50% | b | {last} |"


def test_what_only_the_gpu_builds_is_read_there() -> None:
    refused = CASE | {"source": None, "fp8": None, "kept": [], "refusal": "no torchvision", "difference": None}
    served = CASE | {"difference": 0.02, "failure": None}
    assert table([refused], [served]).splitlines()[-1] == "| `a` | `A` | 50% | b | no: no torchvision | yes: 0.020 |"


def test_a_skipped_test_is_no_case_and_an_expected_failure_is_one() -> None:
    kept: list[Json] = []
    recorder = FamilyRecorder(kept.append)
    for family, outcome, expected in (("gone", "skipped", None), ("there", "passed", None), ("no", "skipped", "why")):
        properties = [("family", family), ("difference", 0.01)]
        for when in ("setup", "call", "teardown"):
            report = pytest.TestReport(
                family,
                ("", 0, ""),
                {},
                outcome if when == "call" else "passed",
                None,
                when,
                user_properties=properties,
            )
            if expected is not None:
                report.wasxfail = expected
            recorder.pytest_runtest_logreport(report)
    assert kept == [
        {"family": "there", "difference": 0.01, "failure": None},
        {"family": "no", "difference": 0.01, "failure": "why"},
    ]
    assert recorder.seen == {"gone", "there", "no"}
