"""Keeps what ``make demo`` has measured as a result.

    make demo && python -m benchmarks.training.demo

The demo is ``examples.grpo_digits``; it leaves its figures in ``out/demo/summary.json``.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.paths import PROJECT


def main(
    summary: Annotated[Path, typer.Option(help="What the demo has written.", exists=True, dir_okay=False)] = PROJECT
    / "out/demo/summary.json",
) -> None:
    """Write benchmarks/results/<machine>/training/demo.json."""
    path = results.write("training_demo", {"summary": json.loads(summary.read_text())})
    Console(soft_wrap=True).print(f"wrote {path}")


if __name__ == "__main__":
    run(main)
