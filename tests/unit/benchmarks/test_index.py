"""The table of benchmarks/README.md is what the results say, and whoever forgets it is told."""

import re
from collections.abc import Iterator

from benchmarks.common.paths import PROJECT, RESULTS
from benchmarks.index import BENCHMARKS, README, problems

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
