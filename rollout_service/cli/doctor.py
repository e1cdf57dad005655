"""``rollout-service doctor``: run every check, each for a limited time, and print the findings."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rollout_service.cli.checks import CHECKS, Finding, Plan

if TYPE_CHECKING:
    from rich.console import Console

LIMIT_S = 30.0
"""Timeout in seconds of a check, for hanging network disks and drivers."""
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}

Check = Callable[[Plan], Iterable[Finding]]


def examine(plan: Plan, checks: Sequence[Check] = CHECKS, limit_s: float = LIMIT_S) -> list[Finding]:
    """Run the checks at once and return their findings. A check that has not ended after ``limit_s`` is a problem."""
    deadline = time.monotonic() + limit_s
    running = [_Running(check, plan) for check in checks]
    for each in running:
        each.join(max(0.0, deadline - time.monotonic()))
    return [finding for each in running for finding in each.result(limit_s)]


def print_findings(findings: Sequence[Finding], console: "Console") -> None:
    """Print one line for each finding, the advice below it, and a conclusion."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        advice = f"\n→ {finding.advice}" if finding.advice else ""
        level = f"[{_COLOURS[finding.level]}]{finding.level}[/]"
        table.add_row(level, finding.check, escape(finding.found + advice))
    console.print(table)
    count = sum(finding.level == "problem" for finding in findings)
    console.print(f"Problems that keep the service from starting: {count}" if count else "The service can start.")


class _Running(threading.Thread):
    """A running check, in a daemon thread that is abandoned if it hangs."""

    def __init__(self, check: Check, plan: Plan) -> None:
        super().__init__(daemon=True, name=check.__name__)
        self._check, self._plan = check, plan
        self._found: list[Finding] = []
        self.start()

    def run(self) -> None:
        try:
            self._found = list(self._check(self._plan))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._found = [Finding(check=self.name, level="warning", found=f"not known: {error}")]

    def result(self, limit_s: float) -> list[Finding]:
        """Return its findings, or a problem if it has not ended."""
        if self.is_alive():
            return [Finding(check=self.name, level="problem", found=f"no answer within {limit_s:g} s")]
        return self._found
