"""Drive the service with other people's clients, and keep what came of it.

    python -m benchmarks.clients
    python -m benchmarks.clients -- -v -k areal

Runs the tests of ``tests/clients``, which need ``make clients``, and those of ``tests/service`` that hold contracts of
clients, each folder with one service of its own. Writes benchmarks/results/<machine>/clients.json and the table of
docs/clients.md, which is of one machine. A client that is not installed keeps its row. Exits as pytest does.
"""

from typing import Annotated

import pytest
import typer

from benchmarks.clients.recorder import ClientRecorder
from benchmarks.clients.released import CLIENTS
from benchmarks.clients.table import RESULT, write_table
from benchmarks.common import results
from benchmarks.common.command import run

CONTRACTS = ("test_trainer_contracts.py", "test_trainer_routes.py", "test_weight_transfer.py")
TESTS = (["tests/clients"], [f"tests/service/{file}" for file in CONTRACTS])
"""One service at a time."""


def main(
    options: Annotated[list[str] | None, typer.Argument(help="Of pytest, such as -v, or -k areal.")] = None,
) -> None:
    """Run them in this process, one folder after the other; write the result and the table."""
    recorder = ClientRecorder()
    codes = [pytest.main([*tests, *(options or [])], plugins=[recorder]) for tests in TESTS]
    names = [client.name for client in CLIENTS]
    cases = results.joined(results.cases("clients"), recorder.cases(), ["client"])
    kept = sorted((case for case in cases if case["client"] in names), key=lambda case: names.index(case["client"]))
    if results.write("clients", {"cases": kept}) == RESULT:
        write_table()
    for name in recorder.skipped():
        typer.echo(f"{name}: not all of its tests ran; its row stays as it was", err=True)
    raise typer.Exit(int(max(codes)))


if __name__ == "__main__":
    run(main)
