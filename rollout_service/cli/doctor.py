"""``rollout-service doctor``: run every check and print the findings."""

import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rollout_service.cli.checks import CHECKS, Finding, Plan

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}

Check = Callable[[Plan], Iterable[Finding]]


def examine(plan: Plan, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run the checks and return their findings."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check(plan)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            findings.append(Finding(check=check.__name__, level="warning", found=f"not known: {error}"))
    return findings


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
