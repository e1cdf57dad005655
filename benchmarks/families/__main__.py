"""What becomes FP8 of every family of models, and what came of serving each by a small engine.

    python -m benchmarks.families               an engine of each: half a minute a family
    python -m benchmarks.families -- -k gemma
    python -m benchmarks.families --read        what vLLM's classes say alone; no engine is started

Runs ``tests/engine/test_every_family.py``. Writes benchmarks/results/<machine>/models.json and the table of
docs/models.md. Families that are not tested now keep what came of them before. Exits as pytest does.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.results import Json
from benchmarks.families.table import write_tables
from rollout_service.config import QuantConfig
from rollout_service.model.quant_plan import plan
from rollout_service.model.served_model import ServedModel
from tests.support import families

TESTS = "tests/engine/test_every_family.py"
UNREAD: Json = {"refusal": None, "source": None, "fp8": None, "kept": []}
"""What is known of a family before vLLM's class of it is read."""


def reason_of(failure: str) -> str:
    """The last line of what was raised, out of pytest's account of a failure; without one its last line."""
    lines = failure.strip().splitlines()
    return next((line[1:].strip() for line in reversed(lines) if line.startswith("E ")), lines[-1])


class FamilyRecorder:
    """A pytest plugin that keeps the properties and the outcome of each test that names its family."""

    def __init__(self, keep: Callable[[Json], None]) -> None:
        self._keep = keep
        self.seen: set[str] = set()
        """Families of all tests, skipped ones too."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """pytest's hook: set-up, call and tear-down of one test have each a report."""
        recorded = dict(report.user_properties)
        if "family" not in recorded or report.when != "call":
            return
        self.seen.add(str(recorded["family"]))
        expected = getattr(report, "wasxfail", None)  # pytest calls a failure that was expected skipped
        if report.skipped and expected is None:
            return
        failed = report.failed or report.skipped
        failure = expected or reason_of(report.longreprtext)[:300] if failed else None
        self._keep({"family": recorded["family"], "difference": recorded.get("difference"), "failure": failure})


def readings(of: Iterable[str]) -> Iterator[Json]:
    """Yield a case for each family. Imports vllm, and is one rank of a distributed group for each in turn."""
    for family in of:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / family
            families.config_of(family).save_pretrained(folder)
            yield {"family": family, **_reading(folder)}


def _reading(folder: Path) -> Json:
    from rollout_service.engine.layout_reader import read_layout  # imports vLLM

    model = ServedModel.load(folder)
    try:
        layout = read_layout(folder)
    except ValueError as refusal:
        return {"refusal": str(refusal).partition(f"{folder.name}: ")[2], "source": None, "fp8": None, "kept": []}
    decided = plan(layout.linears(model.shapes), QuantConfig(indivisible="keep_bf16"), 1, model.heads, layout=layout)
    outside = {model.head, model.embedding}
    sizes = {n: math.prod(s) for n, s in model.shapes.items() if len(s) > 1 and n not in outside}
    share = sum(sizes[name] for name in decided.quantized) / sum(sizes.values())
    kept = sorted(set(decided.kept.values()) - {"router"})
    return {"refusal": None, "source": layout.source, "fp8": share, "kept": kept}


def main(
    read: Annotated[bool, typer.Option("--read", help="Start no engine.")] = False,
    options: Annotated[list[str] | None, typer.Argument(help="Of pytest, such as -v, or -k gemma.")] = None,
) -> None:
    """Serve and read them; write the result and the table."""

    def keep(case: Json) -> None:
        read_before = {key: _kept(case["family"]).get(key, value) for key, value in UNREAD.items()}
        _add(read_before | case)

    recorder = FamilyRecorder(keep)
    code = 0 if read else pytest.main([TESTS, "-m", "slow", *(options or [])], plugins=[recorder])
    of_engine = {"difference": None, "failure": None}
    for case in readings(sorted(families.FAMILIES if read else recorder.seen)):
        _add(of_engine | _kept(case["family"]) | case)
    write_tables()
    raise typer.Exit(int(code))


def _kept(family: str) -> Json:
    return next((case for case in results.cases("models") if case["family"] == family), {})


def _add(case: Json) -> None:
    results.add("models", [case], ("family",))


if __name__ == "__main__":
    run(main)
