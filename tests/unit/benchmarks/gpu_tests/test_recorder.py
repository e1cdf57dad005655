"""What is kept of a run of tests is what pytest said of it."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_tests.recorder import Recorder

TESTS = """
import pytest

def test_passes(record_property):
    record_property("closed_ms", [1.5, 2])
    record_property("way", "by plan")

def test_fails():
    assert 1 == 2

def test_is_skipped():
    pytest.skip("no GPU")

@pytest.fixture
def broken():
    raise OSError("no")

def test_has_an_error(broken):
    pass

@pytest.fixture
def breaks_at_its_end():
    yield
    raise OSError("late")

def test_fails_at_its_end(breaks_at_its_end):
    pass
"""


def test_counts_outcomes_and_properties_after_every_test(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    written: list[dict[str, Any]] = []
    pytest.main(["-q", "-p", "no:cacheprovider", str(tmp_path)], plugins=[Recorder(written.append)])
    counts = [(content["passed"], content["failed"], content["skipped"]) for content in written]
    assert counts == [(1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 2, 1), (1, 3, 1)]
    first, second, *_, last = written[-1]["tests"]
    assert first["test"].endswith("test_some.py::test_passes") and first["outcome"] == "passed"
    assert (first["closed_ms"], first["way"]) == ([1.5, 2], "by plan")
    assert "assert 1 == 2" in second["why"] and "late" in last["why"]
    assert written[-1]["tests"][2]["why"] == "Skipped: no GPU"
