"""The table of docs/clients.md: what ``python -m benchmarks.clients`` found.

python -m benchmarks.clients.table            says what is wrong and exits with 1 if table and result do not agree
python -m benchmarks.clients.table --write    makes the table anew
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.clients.released import CLIENTS
from benchmarks.common.marked import exit_with, markdown_table, with_part, write_part
from benchmarks.common.paths import PROJECT, RESULTS
from benchmarks.common.results import Json

PAGE = PROJECT / "docs/clients.md"
RESULT = RESULTS / "cpu-2-cores/clients.json"
PART = "python -m benchmarks.clients.table --write"


def table(cases: list[Json]) -> str:
    """A row for each client that was run: what the result says of it, with the texts of ``released.py``."""
    rows = []
    found = {case["client"]: case for case in cases}
    for client in CLIENTS:
        if (case := found.get(client.name)) is not None:
            tested = client.tested if case["passed"] else f"**fails** ({case['date']}): {client.tested}"
            rows.append((client.linked, case["version"], client.rollouts, client.weights, tested))
    return markdown_table(("", "version", "rollouts", "weights", "how it was tested"), rows)


def problems(result: Path, page: Path) -> list[str]:
    """What is wrong with the table in ``page``, in words; nothing if it is as the result says."""
    cases = json.loads(result.read_text())["cases"]
    missing = [client.name for client in CLIENTS if client.name not in {case["client"] for case in cases}]
    found = [f"{result}: nothing of {name}. Run make clients test-clients" for name in missing]
    try:
        if with_part(page.read_text(), PART, table(cases)) != page.read_text():
            found.append(f"{page}: the table of clients is not what the result says. Run: {PART}")
    except ValueError as error:
        found.append(f"{page}: {error}")
    return found


def write_table() -> None:
    """Make it anew."""
    write_part(PAGE, PART, table(json.loads(RESULT.read_text())["cases"]))


def main(write: Annotated[bool, typer.Option("--write", help="Make the table anew.")] = False) -> None:
    """Check that the page's table is what the result says; exit with 1 and say why if it is not."""
    if write:
        write_table()
    exit_with(problems(RESULT, PAGE))


if __name__ == "__main__":
    typer.run(main)
