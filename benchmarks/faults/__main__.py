"""Breaks everything that can break, under load, and says what it cost.

    python -m benchmarks.faults [--only WORDS] [--list] [--rest] [--kv-cache keep]

Real engines on the CPU behind the shipped deployment, two replicas, weights whose every token tells their version.
Each case injects one fault into concurrent rollouts and waits until the fleet is whole again. All counts of stale
tokens, lost requests and lost versions are to be zero; the exit status says whether they are.

With ``--kv-cache keep`` the rollouts are turns of sessions, whose keys and values outlive versions up to a bound. A
token is stale if its cache is older than the bound, or than its span says.
"""

import asyncio
import dataclasses
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import run as run_command
from benchmarks.common.paths import PROJECT
from benchmarks.faults.ground import KEPT_CACHE, Case
from benchmarks.faults.matrix import all_cases, run
from benchmarks.faults.outcome import Outcome

IN_PART = PROJECT / "out/benchmarks"
"""What is not the whole matrix is no result."""


def line(outcome: Outcome) -> str:
    """For the log."""
    if outcome.skipped:
        return f"skip {outcome.name}: {outcome.skipped}"
    seconds = "never" if outcome.recover_s is None else f"{outcome.recover_s:.1f} s"
    state = "ok  " if outcome.clean else "FAIL"
    return f"{state} {outcome.name}: recovered {seconds}, {outcome.rollouts} rollouts {'; '.join(outcome.notes)[:300]}"


def table_of(outcomes: list[Outcome]) -> Table:
    """For people."""
    table = Table(title=f"faults on {results.machine()}")
    for column in ("case", "survived", "recovered, s", "stale tokens", "lost requests", "lost versions", "rollouts"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for o in outcomes:
        seconds = "" if o.recover_s is None else f"{o.recover_s:.1f}"
        counts = (o.stale_tokens, o.lost_requests, o.lost_versions, o.rollouts)
        survived = "skipped" if o.skipped else "yes" if o.survived else "NO"
        table.add_row(o.name, survived, seconds, *([""] * 4 if o.skipped else map(str, counts)))
    return table


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Run the cases whose names hold this; may be repeated.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the cases' names.")] = False,
    rest: Annotated[
        bool, typer.Option("--rest", help="Run the cases that are not clean in the results, and keep the others there.")
    ] = False,
    kv_cache: Annotated[Literal["drop", "keep"], typer.Option(help="weights.kv_cache_on_update.")] = "drop",
) -> None:
    """Run the matrix, print it, and write benchmarks/results/<machine>/faults.json; with --only, below out/.

    With --kv-cache keep the file is faults_kept_cache.json.

    The file is written after every case: a run that was stopped goes on with --rest.
    """
    cases = [case for case in all_cases() if not only or any(words in case.name for words in only)]
    console = Console()
    if listed or not cases:
        console.print("\n".join(case.name for case in cases) or f"no case holds {only!r}")
        raise typer.Exit(0 if listed else 2)
    name, settings = ("faults", {}) if kv_cache == "drop" else ("faults_kept_cache", KEPT_CACHE)
    earlier = kept(cases, name) if rest else []
    record = Record([case.name for case in cases], earlier, IN_PART if only else None, name)
    todo = [case for case in cases if case.name not in record.names]

    def say(outcome: Outcome) -> None:
        console.log(line(outcome), markup=False)
        record.add(outcome)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder), todo, say, settings))
    console.print(table_of(record.outcomes))
    console.print(f"wrote {record.path}")
    is_clean = all(outcome.clean or outcome.skipped for outcome in record.outcomes)
    if kv_cache == "keep":
        kept_tokens = sum(outcome.kept_tokens for outcome in record.outcomes)
        console.print(f"{kept_tokens} tokens read keys and values of older versions")
        is_clean &= kept_tokens > 0 or bool(only)  # some cases push no versions
    raise typer.Exit(0 if is_clean else 1)


class Record:
    """The results' file, written anew with each case."""

    def __init__(self, order: list[str], outcomes: list[Outcome], folder: Path | None, name: str = "faults") -> None:
        """``folder``: of the file, if it is not that of the results. ``name``: of the result."""
        self.outcomes, self.path, self._name = outcomes, Path(), name
        self._order, self._folder, self._started = order, folder, time.perf_counter()

    @property
    def names(self) -> set[str]:
        """Cases that have an outcome."""
        return {outcome.name for outcome in self.outcomes}

    def add(self, outcome: Outcome) -> None:
        """In the matrix's order."""
        outcome.date, outcome.processor = results.today(), results.processor()
        self.outcomes = sorted([*self.outcomes, outcome], key=lambda o: self._order.index(o.name))
        seconds = round(time.perf_counter() - self._started)
        content = {"total_s": seconds, "cases": [asdict(outcome) for outcome in self.outcomes]}
        self.path = results.write(self._name, content, folder=self._folder)


def kept(cases: list[Case], name: str = "faults") -> list[Outcome]:
    """The clean outcomes of an earlier run of the whole matrix on this machine."""
    file = results.path(name)
    if not file.exists():
        return []
    found = json.loads(file.read_text())
    origin = {key: found[key] for key in ("date", "processor")}
    fields = {field.name for field in dataclasses.fields(Outcome)}
    outcomes = [
        Outcome(**{key: value for key, value in (origin | case).items() if key in fields}) for case in found["cases"]
    ]
    return [outcome for outcome in outcomes if outcome.clean and outcome.name in {case.name for case in cases}]


if __name__ == "__main__":
    run_command(main)
