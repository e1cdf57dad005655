"""The table of docs/models.md: what ``python -m benchmarks.families`` found.

python -m benchmarks.families.table            says what is wrong and exits with 1 if table and result do not agree
python -m benchmarks.families.table --write    makes the table anew
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.marked import with_part, write_part
from benchmarks.common.paths import PROJECT, RESULTS
from benchmarks.common.results import Json

DOCUMENT = PROJECT / "docs/models.md"
RESULT = RESULTS / "cpu-2-cores/models.json"
PART = "python -m benchmarks.families.table --write"


def table(cases: list[Json]) -> str:
    """A row for each family, in the order of their names."""
    lines = [
        "| `model_type` | vLLM's class | of its layers in FP8 | why not all | served on the CPU |",
        "|---|---|---|---|---|",
    ]
    for case in sorted(cases, key=lambda case: str(case["family"])):
        cells = (f"`{case['family']}`", _built_as(case), _share(case), _why(case), _served(case))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _built_as(case: Json) -> str:
    return f"`{str(case['source']).rpartition(', ')[2]}`" if case["source"] else "not built on the CPU"


def _share(case: Json) -> str:
    return f"{case['fp8']:.0%}" if case["fp8"] is not None else ""


def _why(case: Json) -> str:
    return "; ".join(case["kept"])


def _served(case: Json) -> str:
    if case["refusal"]:
        return f"no: {_cell(case['refusal'])}"
    if case["failure"]:
        return f"**fails**: {_cell(case['failure'])}"
    if case["difference"] is None:
        return "not tried"
    return f"yes: logprobs differ from fp32's by {case['difference']:.3f}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def problems(result: Path, document: Path) -> list[str]:
    """What is wrong with the table in ``document``, in words; nothing if it is as the result says."""
    cases = json.loads(result.read_text())["cases"]
    try:
        if with_part(document.read_text(), PART, table(cases)) != document.read_text():
            return [f"{document}: the table of models is not what the result says. Run: {PART}"]
    except ValueError as error:
        return [f"{document}: {error}"]
    return []


def write_table() -> None:
    """Make it anew."""
    write_part(DOCUMENT, PART, table(json.loads(RESULT.read_text())["cases"]))


def main(write: Annotated[bool, typer.Option("--write", help="Make the table anew.")] = False) -> None:
    """Check that the table is what the result says; exit with 1 and say why if it is not."""
    if write:
        write_table()
    found = problems(RESULT, DOCUMENT)
    for problem in found:
        typer.echo(problem.replace(f"{PROJECT}/", ""), err=True)
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
