"""The table of benchmarks/README.md is what the results say, and whoever forgets it is told."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import headlines, index
from benchmarks.common.marked import write_part
from benchmarks.common.paths import PROJECT, RESULTS
from benchmarks.index import BENCHMARKS, PART, README, Benchmark, found_results, problems, table

PARTS_OF_OTHERS = {
    "benchmarks.update.waterfall",
    "benchmarks.mismatch.logprobs_tables",
    "benchmarks.index",
    "benchmarks.clients.table",
    "benchmarks.families.table",
    "benchmarks.faults.nodes",
    "benchmarks.faults.broadcasting_trainer",
    "benchmarks.group_attention_plot",
    "benchmarks.trainers.trl_training",
}
"""Modules that can be started and measure nothing by themselves."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the results, with a page that has their table."""
    shutil.copytree(RESULTS, tmp_path / "results")
    readme = tmp_path / "README.md"
    readme.write_text(f"<!-- made by {PART} -->\n<!-- end of {PART} -->\n")
    write_part(readme, PART, table(tmp_path / "results"))
    assert found(tmp_path) == []
    return tmp_path


def found(folder: Path) -> list[str]:
    return problems(folder / "results", folder / "README.md")


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def modules() -> Iterator[str]:
    """Those of ``benchmarks`` that can be started."""
    for file in (PROJECT / "benchmarks").rglob("*.py"):
        if '__name__ == "__main__"' in file.read_text():
            yield ".".join(file.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__main__")


def test_the_page_is_up_to_date() -> None:
    assert problems(RESULTS, README) == []


def test_every_benchmark_has_a_row() -> None:
    assert set(modules()) - PARTS_OF_OTHERS == {f"benchmarks.{benchmark.module}" for benchmark in BENCHMARKS}


def test_names_of_results_are_those_that_are_written() -> None:
    for benchmark in BENCHMARKS:
        base = PROJECT / "benchmarks" / benchmark.module.replace(".", "/")
        source = (base / "__main__.py" if base.is_dir() else base.with_suffix(".py")).read_text()
        assert re.search(f"[\"']{benchmark.name}[\"']", source) or f"--name {benchmark.name}" in source, benchmark


class TestProblems:
    def test_a_new_figure_is_not_in_the_table(self, folder: Path) -> None:
        change(folder / "results/cpu-2-cores/rollout_overhead.json", ratio=0.5)
        assert [PART in problem for problem in found(folder)] == [True]

    def test_a_result_without_a_row_is_named(self, folder: Path) -> None:
        (folder / "results/h200/old_rollout.json").write_text("{}")
        assert ["old_rollout.json: no row" in problem for problem in found(folder)] == [True]

    def test_a_row_without_a_result_is_named(self, folder: Path) -> None:
        (folder / "results/cpu-2-cores/soak.json").unlink()
        table_differs, no_result = sorted(found(folder), key=lambda problem: "no result" in problem)
        assert "python -m benchmarks.soak: no result" in no_result
        assert PART in table_differs

    def test_a_result_that_was_awaited_wants_its_row(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        awaited = Benchmark("rollout.awaited", lambda _: "1", awaited=True)
        monkeypatch.setattr(Benchmark, "exists", lambda _: True)
        monkeypatch.setattr(index, "BENCHMARKS", (*BENCHMARKS, awaited))
        assert found(folder) == []
        (folder / "results/h200/rollout_awaited.json").write_text('{"date": "today"}')
        there, table_differs = sorted(found(folder), key=lambda problem: PART in problem)
        assert "python -m benchmarks.rollout.awaited: there is a result. Take awaited out" in there
        assert PART in table_differs

    def test_a_result_that_has_no_figure_is_named(self, folder: Path) -> None:
        change(folder / "results/cpu-2-cores/rollout_overhead.json", ratio=None)
        (problem,) = found(folder)
        assert "rollout_overhead.json: no headline, TypeError" in problem

    def test_a_page_without_the_marks_is_named(self, folder: Path) -> None:
        (folder / "README.md").write_text("no table\n")
        assert ["the page must hold" in problem for problem in found(folder)] == [True]

    def test_a_result_of_another_machine_wants_a_row(self, folder: Path) -> None:
        shutil.copytree(folder / "results/cpu-2-cores", folder / "results/cpu-4-cores")
        assert len(found(folder)) == 1
        assert table(folder / "results").count("| cpu-4-cores |") == len(
            list((RESULTS / "cpu-2-cores").rglob("*.json"))
        )


class TestHeadlines:
    def test_there_is_one_figure_at_least_in_each(self) -> None:
        for line in table(RESULTS).splitlines()[2:]:
            assert re.search(r"\d", line.split("|")[2]), line

    def test_a_fault_that_was_skipped_shows_nothing(self) -> None:
        clean = {"skipped": "", "survived": True, "stale_tokens": 0, "lost_requests": 0, "lost_versions": 0}
        cases = [clean, clean | {"lost_requests": 1}, clean | {"survived": False}, clean | {"skipped": "no tmpfs"}]
        assert headlines.faults({"cases": cases}).startswith("1 of 3 faults")

    def test_medians_are_compared(self) -> None:
        cases = [{"way": "device", "model": "m", "load_s": [0.010, 0.012, 0.5]}, {"way": "native", "load_s": [0.2]}]
        assert headlines.engine_update({"cases": cases}) == "m loaded in 12 ms, by vLLM in 200"

    def test_a_case_that_is_not_there_is_named(self) -> None:
        with pytest.raises(ValueError, match="'way': 'native'"):
            headlines.engine_update({"cases": [{"way": "device", "model": "m", "load_s": [0.010]}]})


def test_machines_and_names_are_told_from_paths(tmp_path: Path) -> None:
    for name in ("h200/update_live.json", "2x-h200/update_live.json", "h200/soak.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert {name: len(files) for name, files in found_results(tmp_path).items()} == {"update_live": 2, "soak": 1}


def test_a_command_is_what_is_typed() -> None:
    demo = Benchmark("training.demo", headlines.demo, before="make demo")
    assert demo.command == "make demo && python -m benchmarks.training.demo"
    assert not Benchmark("training.nothing", headlines.demo).exists()
