"""Drive the service with other people's clients, and keep what came of it.

    python -m benchmarks.clients
    python -m benchmarks.clients -- -v -k areal

Runs the tests of ``tests/clients``, which need ``make clients``, and those of ``tests/service`` that hold contracts of
clients, each folder with one service of its own. Writes benchmarks/results/<machine>/clients.json and the table of
docs/clients.md, which is of one machine. A client that is not installed keeps its row. Exits as pytest does.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Annotated

import pytest
import typer

from benchmarks.clients.released import CLIENTS
from benchmarks.clients.table import RESULT, write_table
from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.results import Json

CONTRACTS = ("test_trainer_contracts.py", "test_trainer_routes.py", "test_weight_transfer.py")
TESTS = (["tests/clients"], [f"tests/service/{file}" for file in CONTRACTS])  # one service at a time


class ClientRecorder:
    """A pytest plugin. Raises ``pytest.UsageError`` for a mark that names none of ``CLIENTS``."""

    def __init__(self) -> None:
        self._client: dict[str, str] = {}
        self._outcomes: dict[str, dict[str, str]] = defaultdict(dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """pytest's hook: all tests that were found, before options such as ``-k`` deselect any."""
        for item in items:
            if (mark := item.get_closest_marker("client")) is not None:
                if mark.args[0] not in {client.name for client in CLIENTS}:
                    raise pytest.UsageError(f"{item.nodeid}: benchmarks/clients/released.py has no {mark.args[0]!r}")
                self._client[item.nodeid] = mark.args[0]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            if (client := self._client.get(item.nodeid)) is not None:
                self._outcomes[client][item.nodeid] = "skipped"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """pytest's hook: set-up, call and tear-down of one test have each a report."""
        if (client := self._client.get(report.nodeid)) is not None:
            outcomes = self._outcomes[client]
            if report.outcome != "passed" or report.nodeid not in outcomes:
                outcomes[report.nodeid] = report.outcome

    def skipped(self) -> list[str]:
        """Clients of which a test did not run, as where they are not installed. Their rows stay as they were."""
        return [client for client, outcomes in self._outcomes.items() if "skipped" in outcomes.values()]

    def cases(self) -> Iterator[Json]:
        """Yield a case for each client all of whose tests ran."""
        for client in CLIENTS:
            if client.name in self._outcomes and client.name not in self.skipped():
                outcomes = self._outcomes[client.name].values()
                yield {
                    "client": client.name,
                    "version": client.version(),
                    "tests": len(outcomes),
                    "passed": all(outcome == "passed" for outcome in outcomes),
                }


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
