"""The check's result for people and for programs."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dashboards.check.answers import Answers


def printed(answers: Answers, console: Console) -> None:
    """Panel → samples, alert → samples, and what is wrong."""
    panels = Table("panel", "query", "series", "samples", "largest", title="Panels")
    for each in answers.panels:
        samples = str(each.samples) if each.samples else "[red]empty[/red]"
        largest = f"{each.largest:.4g}" if each.samples else ""
        panels.add_row(each.query.name, each.query.legend, str(len(each.series)), samples, largest)
    alerts = Table("alert", "samples", "fires in", "rule", title="Alerts")
    for rule in answers.alerts:
        alerts.add_row(rule.alert.name, str(rule.samples), str(rule.fired), rule.health)
    console.print(panels)
    console.print(alerts)
    for name, values in answers.variables.items():
        console.print(f"variable {name}: {', '.join(values) or '[red]empty[/red]'}")
    for target in answers.down:
        console.print(f"[red]not scraped[/red] {target}")
    console.print("[green]every panel has samples[/green]" if answers.good else f"[red]empty[/red]: {answers.empty}")


def written(answers: Answers, path: Path) -> Path:
    """``{"panels", "alerts", "empty"}``; ``empty`` has names."""
    content = {
        "panels": [
            {
                "dashboard": each.query.dashboard,
                "panel": each.query.panel,
                "query": each.query.legend,
                "series": len(each.series),
                "samples": each.samples,
            }
            for each in answers.panels
        ],
        "alerts": [
            {"alert": each.alert.name, "samples": each.samples, "fires_in": each.fired, "health": each.health}
            for each in answers.alerts
        ],
        "empty": answers.empty,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
