"""What a result says of itself, and what becomes of a file that holds other cases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import results
from benchmarks.common.paths import PROJECT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return tmp_path


def test_a_result_lies_below_its_machine(folder: Path) -> None:
    path = results.write("update_live", {"cases": [1]}, machine_name="h200")
    assert path == folder / "h200/update_live.json"
    content = json.loads(path.read_text())
    assert content["cases"] == [1]
    assert content.keys() == {"command", "date", "processor", "python", "versions", "cases"}


def test_a_result_may_not_say_otherwise(folder: Path) -> None:
    with pytest.raises(ValueError, match="versions"):
        results.write("demo", {"versions": 41})
    assert list(folder.iterdir()) == []


def test_what_is_no_result_lies_elsewhere(folder: Path, tmp_path: Path) -> None:
    path = results.write("faults", {"cases": []}, folder=tmp_path / "out")
    assert path == tmp_path / "out/faults.json" and path.is_file()


@pytest.mark.parametrize("module", ["some_benchmark", "some_benchmark.part"])
def test_the_command_is_the_one_of_the_process(module: str, tmp_path: Path) -> None:
    package = tmp_path / "some_benchmark"
    package.mkdir()
    for name in ("__main__", "part"):
        (package / f"{name}.py").write_text("from benchmarks.common import results\n\nprint(results.command())\n")
    (package / "__init__.py").write_text("")
    run = [sys.executable, "-m", module, "--seed", "1"]
    environment = {"PYTHONPATH": f"{PROJECT}{os.pathsep}{tmp_path}"}
    found = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == f"python -m {module} --seed 1\n"


class TestJoinedCases:
    def test_a_new_case_says_how_it_was_made(self) -> None:
        (case,) = results.joined([], [{"seed": 1}], ("seed",))
        assert case == {"seed": 1, "date": results.today(), "command": results.command()}

    def test_it_replaces_those_that_measured_the_same(self) -> None:
        earlier = [{"model": "a", "transport": "path", "s": 1}, {"model": "b", "transport": "path", "s": 2}]
        found = results.joined(earlier, [{"model": "a", "transport": "path", "s": 3}], ("model", "transport"))
        assert [(case["model"], case["s"]) for case in found] == [("b", 2), ("a", 3)]

    def test_a_field_that_an_earlier_case_lacks_differs(self) -> None:
        found = results.joined([{"transport": "path"}], [{"transport": "path", "layers": 2}], ("transport", "layers"))
        assert len(found) == 2

    def test_a_result_that_is_not_there_has_no_cases(self, folder: Path) -> None:
        assert results.cases("soak") == []
        results.write("soak", {"cases": [{"seed": 1}]})
        assert results.cases("soak") == [{"seed": 1}]
