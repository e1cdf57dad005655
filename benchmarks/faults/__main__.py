"""Breaks everything that can break, under load, and says what it cost.

    python -m benchmarks.faults [--only WORDS] [--rest] [--kv-cache keep]

Real engines on the CPU behind the shipped deployment, two replicas, weights whose every token tells their version.
Each case injects one fault into concurrent rollouts and waits until the fleet is whole again. All counts of stale
tokens, lost requests and lost versions are to be zero; the exit status says whether they are.

With ``--kv-cache keep`` the rollouts are turns of sessions, whose keys and values outlive versions up to a bound. A
token is stale if its cache is older than the bound, or than its span says.
"""

import asyncio
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from benchmarks.common import results
from benchmarks.common.command import run as run_command
from benchmarks.common.paths import PROJECT
from benchmarks.faults.ground import KEPT_CACHE
from benchmarks.faults.matrix import all_cases, run
from benchmarks.faults.outcome import Outcome, is_clean

IN_PART = PROJECT / "out/benchmarks"  # what is not the whole matrix is no result


def line(outcome: Outcome) -> str:
    if outcome.skipped:
        return f"skip {outcome.name}: {outcome.skipped}"
    seconds = "never" if outcome.recover_s is None else f"{outcome.recover_s:.1f} s"
    state = "ok  " if is_clean(asdict(outcome)) else "FAIL"
    return f"{state} {outcome.name}: recovered {seconds}, {outcome.rollouts} rollouts {'; '.join(outcome.notes)[:300]}"


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Run the cases whose names hold this; may be repeated.")
    ] = None,
    rest: Annotated[
        bool, typer.Option("--rest", help="Run the cases that are not clean in the results, and keep the others there.")
    ] = False,
    kv_cache: Annotated[Literal["drop", "keep"], typer.Option(help="weights.kv_cache_on_update.")] = "drop",
) -> None:
    """Run the matrix, and write benchmarks/results/<machine>/faults.json; with --only, below out/."""
    cases = [case for case in all_cases() if not only or any(words in case.name for words in only)]
    console, started = Console(), time.perf_counter()
    if not cases:
        raise typer.BadParameter(f"--only {only}: no case holds this; there are {[case.name for case in all_cases()]}")
    name, settings = ("faults", {}) if kv_cache == "drop" else ("faults_kept_cache", KEPT_CACHE)
    order = [case.name for case in cases]
    found = [case for case in results.cases(name) if case["name"] in order and is_clean(case)] if rest else []
    todo = [case for case in cases if case.name not in {each["name"] for each in found}]

    def keep(outcome: Outcome) -> None:
        console.log(line(outcome), markup=False)
        found.append(asdict(outcome) | {"date": results.today(), "processor": results.processor()})
        found.sort(key=lambda case: order.index(case["name"]))
        content = {"total_s": round(time.perf_counter() - started), "cases": found}
        results.write(name, content, folder=IN_PART if only else None)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder), todo, keep, settings))
    succeeded = all(case["skipped"] or is_clean(case) for case in found)
    if kv_cache == "keep":
        kept_tokens = sum(case["kept_tokens"] for case in found)
        console.print(f"{kept_tokens} tokens read keys and values of older versions")
        succeeded &= kept_tokens > 0 or bool(only)  # some cases push no versions
    raise typer.Exit(0 if succeeded else 1)


if __name__ == "__main__":
    run_command(main)
