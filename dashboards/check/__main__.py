"""Run every panel's and every alert's query against a real Prometheus that scrapes a real service.

    make dashboards-check        or        python -m dashboards.check --plot

Starts the CPU service with two replicas, lets rollouts, updates and reports happen, and prints what each panel shows.
A panel without samples is a failure. Result: out/dashboards.json; the exit status tells.
"""

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dashboards.check import plot, schema
from dashboards.check.answers import Answers, asked
from dashboards.check.prometheus import (
    Prometheus,
    PrometheusUnavailable,
    Say,
    Tools,
    configured,
    found_or_fetched,
    running,
)
from dashboards.check.queries import FOLDER
from dashboards.check.report import printed, written
from dashboards.check.traffic import Traffic
from rollout_service.client import RolloutClient
from rollout_service.local import LocalService, running_service

PROJECT = FOLDER.parent
OUT = PROJECT / "out"
DEPLOYMENT = PROJECT / "deployments/cpu_rollout.yaml"
SCRAPE_S = 2
LAST_REPORT_S = 22.0
"""Until what processes counted last has come through Ray, which reports every 10 s."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def main(
    updates: Annotated[int, typer.Option(help="Versions that are pushed.", min=2)] = 5,
    step_s: Annotated[float, typer.Option(help="Seconds of rollouts after each.", min=5)] = 10.0,
    plot_file: Annotated[bool, typer.Option("--plot", help="Draw docs/dashboards.png from the answers.")] = False,
) -> None:
    """Check the committed dashboards and alerts."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is stopped then, too
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - started:6.1f} s  {text}", soft_wrap=True)

    try:
        tools = found_or_fetched(OUT / "prometheus", say)
        _static(tools, say)
        with tempfile.TemporaryDirectory() as folder:
            answers = _against_a_service(tools, Path(folder), updates, step_s, say)
    except KeyboardInterrupt:
        say("interrupted: what was started is stopped")
        raise typer.Exit(130) from None
    except (PrometheusUnavailable, subprocess.CalledProcessError) as error:
        say(f"[red]not checked[/red]: {error}")
        raise typer.Exit(1) from None
    printed(answers, console)
    say(f"written to {written(answers, OUT / 'dashboards.json').relative_to(PROJECT)}")
    if plot_file:
        say(f"drawn: {plot.drawn(answers, PROJECT / 'docs/dashboards.png').relative_to(PROJECT)}")
    raise typer.Exit(0 if answers.good else 1)


def _static(tools: Tools, say: Say) -> None:
    say(tools.check("config", str(FOLDER / "prometheus.yml")).splitlines()[0])
    say(tools.check("rules", str(FOLDER / "alerts.yml")).splitlines()[-1].strip())
    tests = FOLDER / "alerts_test.yml"
    subprocess.run([tools.promtool, "test", "rules", tests.name], cwd=FOLDER, check=True)
    say(f"{len(schema.round_trips())} dashboards come back from Grafana's model as they went in")


def _against_a_service(tools: Tools, folder: Path, updates: int, step_s: float, say: Say) -> Answers:
    overrides: dict[str, dict[str, Any]] = {
        "scaling": {"min_replicas": 2, "max_replicas": 2},
        "engine": {"admission_limit": 128, "version_wait_s": 2.0},
        "weights": {"root": folder / "weights"},
        "monitor": {"min_tokens": 100},
    }
    say("starting the service with two engines")
    with running_service(DEPLOYMENT, overrides) as service:
        say(f"the service answers at {service.url}; starting Prometheus")
        own, *agents = (url.removeprefix("http://").removesuffix("/metrics") for url in service.metrics_targets)
        config = configured(FOLDER / "prometheus.yml", folder, own, agents, SCRAPE_S)
        say(tools.check("config", str(config)).splitlines()[0])
        with running(tools, config, folder) as prometheus:
            return _watched(prometheus, service, updates, step_s, say)


def _watched(prometheus: Prometheus, service: LocalService, updates: int, step_s: float, say: Say) -> Answers:
    begin = time.time()
    asyncio.run(_traffic(service, updates, step_s, say))
    time.sleep(LAST_REPORT_S)
    say("asking every panel's and every alert's query")
    return asked(prometheus, begin, time.time())


async def _traffic(service: LocalService, updates: int, step_s: float, say: Say) -> None:
    async with RolloutClient(service.url) as client:
        await Traffic(client, service.config.model.path, say).run(updates, step_s)


if __name__ == "__main__":
    typer.run(main)
