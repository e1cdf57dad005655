"""What becomes FP8 of every family of models, and what came of serving each by a small engine.

    python -m benchmarks.families               an engine of each: half a minute a family
    python -m benchmarks.families -- -k gemma
    python -m benchmarks.families --read        what vLLM's classes say alone; no engine is started

Runs ``tests/engine/test_every_family.py``. Writes benchmarks/results/<machine>/models.json and the table of
docs/models.md. Families that are not tested now keep what came of them before. Exits as pytest does.
"""

from typing import Annotated

import pytest
import typer

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.families.recorder import FamilyRecorder
from benchmarks.families.table import write_table

TESTS = "tests/engine/test_every_family.py"


def main(
    read: Annotated[bool, typer.Option("--read", help="Start no engine.")] = False,
    options: Annotated[list[str] | None, typer.Argument(help="Of pytest, such as -v, or -k gemma.")] = None,
) -> None:
    """Serve and read them; write the result and the table."""
    from benchmarks.families.reading import readings
    from tests.support.families import FAMILIES

    recorder = FamilyRecorder()
    code = 0 if read else pytest.main([TESTS, "-m", "slow", *(options or [])], plugins=[recorder])
    earlier = {case["family"]: case for case in results.cases("models")}
    served = earlier | {case["family"]: case for case in recorder.cases()}
    cases = []
    for case in readings(sorted(FAMILIES if read else recorder.seen)):
        of_engine = served.get(case["family"], {})
        cases.append(case | {key: of_engine.get(key) for key in ("difference", "failure")})
    results.write("models", {"cases": results.joined(earlier.values(), cases, ("family",))})
    write_table()
    raise typer.Exit(int(code))


if __name__ == "__main__":
    run(main)
