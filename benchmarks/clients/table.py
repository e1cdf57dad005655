"""The table of docs/clients.md: what ``python -m benchmarks.clients`` found.

python -m benchmarks.clients.table            says what is wrong and exits with 1 if table and result do not agree
python -m benchmarks.clients.table --write    makes the table anew
"""

import json
from typing import Annotated

import typer

from benchmarks.clients.released import CLIENTS
from benchmarks.common.marked import check, exit_with, markdown_table, with_part
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


def _page(page: str) -> str:
    return with_part(page, PART, table(json.loads(RESULT.read_text())["cases"]))


def write_table() -> None:
    PAGE.write_text(_page(PAGE.read_text()))


def main(write: Annotated[bool, typer.Option("--write", help="Make the table anew.")] = False) -> None:
    """Check that the page's table is what the result says; exit with 1 and say why if it is not."""
    if write:
        write_table()
    known = {case["client"] for case in json.loads(RESULT.read_text())["cases"]}
    missing = [client.name for client in CLIENTS if client.name not in known]
    found = [f"{RESULT}: nothing of {name}. Run make clients test-clients" for name in missing]
    exit_with([*found, *check(PAGE, _page, PART)])


if __name__ == "__main__":
    typer.run(main)
