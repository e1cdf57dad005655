"""Whose test passed: ``pytest.mark.client`` on a module, a class or a test."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest

from benchmarks.clients.released import CLIENTS
from benchmarks.common.results import Json


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
        """pytest's hook: those that will not run."""
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
        """One for each client all of whose tests ran."""
        for client in CLIENTS:
            if client.name in self._outcomes and client.name not in self.skipped():
                outcomes = self._outcomes[client.name].values()
                yield {
                    "client": client.name,
                    "version": client.version(),
                    "rollouts": client.rollouts,
                    "weights": client.weights,
                    "tested": client.tested,
                    "tests": len(outcomes),
                    "passed": all(outcome == "passed" for outcome in outcomes),
                }
