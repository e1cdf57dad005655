"""What is kept of a run of tests is what pytest said of it."""

from pathlib import Path

import pytest

from benchmarks.gpu_tests import content_of

TESTS = """
import pytest

def test_passes(record_property):
    record_property("closed_ms", [1.5, 2])
    record_property("way", "by plan")

def test_fails():
    assert False

def test_is_skipped():
    pytest.skip("no GPU")

@pytest.fixture
def broken():
    raise OSError("no")

def test_has_an_error(broken):
    pass
"""


def test_counts_outcomes_and_properties(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    junit = tmp_path / "junit.xml"
    pytest.main(["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={junit}", str(tmp_path)])
    content = content_of(junit)
    assert (content["passed"], content["failed"], content["skipped"]) == (1, 2, 1)
    first = content["tests"][0]
    assert first["test"].endswith("test_some.py::test_passes") and first["outcome"] == "passed"
    assert (first["closed_ms"], first["way"]) == ([1.5, 2], "by plan")
