"""benchmarks/README.md has a row for each result and a module for each command."""

from pathlib import Path

from benchmarks.index import problems


def test_a_result_without_row_and_a_lost_module_are_named(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200/known.json").touch()
    (tmp_path / "h200/known_again.json").touch()
    (tmp_path / "h200/other.json").touch()
    module, result = problems("| `python -m benchmarks.lost` | it | | `known` |\n", tmp_path)
    assert "benchmarks.lost" in module and "h200/other.json" in result
