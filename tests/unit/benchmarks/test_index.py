"""benchmarks/README.md has a row for each result and a module for each command."""

from pathlib import Path

from benchmarks.common.paths import RESULTS
from benchmarks.index import README, problems


def test_the_page_agrees_with_the_results() -> None:
    assert list(problems(README.read_text(), RESULTS)) == []


def test_a_result_without_row_and_a_lost_module_are_named(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200/known.json").touch()
    (tmp_path / "h200/known_again.json").touch()
    (tmp_path / "h200/other.json").touch()
    module, result = problems("| `python -m benchmarks.lost` | it | | `known` |\n", tmp_path)
    assert "benchmarks.lost" in module and "h200/other.json" in result
