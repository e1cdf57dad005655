"""Breaks everything that can break, under load, and says what it cost.

    python -m benchmarks.faults [--only WORDS] [--list] [--rest]

Real engines on the CPU behind the shipped deployment, two replicas, weights whose every token tells their version.
Each case injects one fault into concurrent rollouts and waits until the fleet is whole again. All counts of stale
tokens, lost requests and lost versions are to be zero; the exit status says whether they are.
"""

import asyncio
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.faults.disk import disk_cases
from benchmarks.faults.files import file_cases
from benchmarks.faults.ground import Case, Skipped
from benchmarks.faults.inputs import input_cases
from benchmarks.faults.kills import kill_cases
from benchmarks.faults.nodes import node_cases
from benchmarks.faults.outcome import Outcome, run_case
from benchmarks.faults.scale import scale_cases
from benchmarks.faults.terms import only_replica_cases, term_cases


def all_cases() -> Iterator[Case]:
    """The matrix. A case that needs another service than its neighbours names its ``ground``."""
    yield from kill_cases()
    yield from term_cases()
    yield from input_cases()
    yield from file_cases()
    yield from disk_cases()
    yield from only_replica_cases()
    yield from scale_cases()
    yield from node_cases()


async def run(folder: Path, cases: list[Case], say: Callable[[Outcome], None]) -> list[Outcome]:
    """All cases, those in a row with the same ground on one service as long as it survives them."""
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        say(outcome)

    while len(outcomes) < len(cases):
        first = cases[len(outcomes)]
        if first.apart is not None:
            tell(await first.apart(folder / str(len(outcomes))))
            continue
        try:
            async with first.ground(folder / str(len(outcomes))) as place:
                while len(outcomes) < len(cases) and _shares(first, cases[len(outcomes)]):
                    tell(await run_case(place, cases[len(outcomes)]))
                    if outcomes[-1].recover_s is None:
                        break  # the next case starts on new ground
        except Skipped as error:
            tell(Outcome(first.name, skipped=str(error)))
    return outcomes


def _shares(first: Case, other: Case) -> bool:
    return other.ground == first.ground and other.apart is None


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
        bool, typer.Option("--rest", help="Run the cases that are not clean in faults.json, and keep the others there.")
    ] = False,
) -> None:
    """Run the matrix, print it, and write faults.json, with --only faults_in_part.json, below benchmarks/results/.

    The file is written after every case: a run that was stopped goes on with --rest.
    """
    cases = [case for case in all_cases() if not only or any(words in case.name for words in only)]
    console = Console()
    if listed or not cases:
        console.print("\n".join(case.name for case in cases) or f"no case holds {only!r}")
        raise typer.Exit(0 if listed else 2)
    record = Record("faults_in_part" if only else "faults", [case.name for case in cases], kept(cases) if rest else [])
    todo = [case for case in cases if case.name not in record.names]

    def say(outcome: Outcome) -> None:
        console.log(line(outcome), markup=False)
        record.add(outcome)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder), todo, say))
    console.print(table_of(record.outcomes))
    console.print(f"wrote {record.path}")
    raise typer.Exit(0 if all(outcome.clean or outcome.skipped for outcome in record.outcomes) else 1)


class Record:
    """The results' file, written anew with each case."""

    def __init__(self, name: str, order: list[str], outcomes: list[Outcome]) -> None:
        self.outcomes, self.path = outcomes, Path()
        self._name, self._order, self._started = name, order, time.perf_counter()

    @property
    def names(self) -> set[str]:
        """Cases that have an outcome."""
        return {outcome.name for outcome in self.outcomes}

    def add(self, outcome: Outcome) -> None:
        """In the matrix's order."""
        self.outcomes = sorted([*self.outcomes, outcome], key=lambda o: self._order.index(o.name))
        seconds = round(time.perf_counter() - self._started)
        content = {"total_s": seconds, "cases": [asdict(outcome) for outcome in self.outcomes]}
        self.path = results.write(self._name, content)


def kept(cases: list[Case]) -> list[Outcome]:
    """The clean outcomes of an earlier run of the whole matrix on this machine."""
    path = results.path("faults")
    found = json.loads(path.read_text())["cases"] if path.exists() else []
    fields = {field.name for field in dataclasses.fields(Outcome)}
    outcomes = [Outcome(**{key: value for key, value in case.items() if key in fields}) for case in found]
    return [outcome for outcome in outcomes if outcome.clean and outcome.name in {case.name for case in cases}]


if __name__ == "__main__":
    typer.run(main)
