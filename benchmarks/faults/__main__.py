"""Breaks everything that can break, under load, and says what it cost.

    python -m benchmarks.faults [--only WORDS] [--list]

Real engines on the CPU behind the shipped deployment, two replicas, weights whose every token tells their version.
Each case injects one fault into concurrent rollouts and waits until the fleet is whole again. All counts of stale
tokens, lost requests and lost versions are to be zero; the exit status says whether they are.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import results
from benchmarks.faults.disk import disk_cases
from benchmarks.faults.files import file_cases
from benchmarks.faults.ground import Case, Skipped
from benchmarks.faults.inputs import input_cases
from benchmarks.faults.kills import kill_cases
from benchmarks.faults.nodes import node_cases
from benchmarks.faults.outcome import Outcome, run_case
from benchmarks.faults.scale import scale_cases


def all_cases() -> Iterator[Case]:
    """The matrix. A case that needs another service than its neighbours names its ``ground``."""
    yield from kill_cases()
    yield from input_cases()
    yield from file_cases()
    yield from disk_cases()
    yield from scale_cases()
    yield from node_cases()


async def run(folder: Path, cases: list[Case], say: Callable[[str], None]) -> list[Outcome]:
    """All cases, those in a row with the same ground on one service as long as it survives them."""
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        say(line(outcome))

    while len(outcomes) < len(cases):
        first = cases[len(outcomes)]
        if first.apart is not None:
            tell(await first.apart(folder / str(len(outcomes))))
            continue
        try:
            async with first.ground(folder / str(len(outcomes))) as place:
                while len(outcomes) < len(cases) and cases[len(outcomes)].ground == first.ground:
                    tell(await run_case(place, cases[len(outcomes)]))
                    if outcomes[-1].recover_s is None:
                        break  # the next case starts on new ground
        except Skipped as error:
            tell(Outcome(first.name, skipped=str(error)))
    return outcomes


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
) -> None:
    """Run the matrix, print it, and write faults.json, with --only faults_in_part.json, below benchmarks/results/."""
    cases = [case for case in all_cases() if not only or any(words in case.name for words in only)]
    console = Console()
    if listed or not cases:
        console.print("\n".join(case.name for case in cases) or f"no case holds {only!r}")
        raise typer.Exit(0 if listed else 2)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = asyncio.run(run(Path(folder), cases, partial(console.log, markup=False)))
    console.print(table_of(outcomes))
    content = {"total_s": round(time.perf_counter() - started), "cases": [asdict(outcome) for outcome in outcomes]}
    path = results.write("faults_in_part" if only else "faults", content, module="faults")
    console.print(f"wrote {path}")
    raise typer.Exit(0 if all(outcome.clean or outcome.skipped for outcome in outcomes) else 1)


if __name__ == "__main__":
    typer.run(main)
