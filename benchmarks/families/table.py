"""The table of docs/models.md: what ``python -m benchmarks.families`` found.

python -m benchmarks.families.table            says what is wrong and exits with 1 if table and results do not agree
python -m benchmarks.families.table --write    makes the table anew
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import results
from benchmarks.common.marked import with_part, write_part
from benchmarks.common.paths import PROJECT
from benchmarks.common.results import Json

DOCUMENT = PROJECT / "docs/models.md"
PART = "python -m benchmarks.families.table --write"


def table(cpu_cases: list[Json], gpu_cases: list[Json]) -> str:
    """A row for each family, in the order of their names, of what two machines found."""
    lines = [
        "| `model_type` | vLLM's class | of its layers in FP8 | why not all | served on the CPU | on an H100 |",
        "|---|---|---|---|---|---|",
    ]
    gpu = {case["family"]: case for case in gpu_cases}
    for case in sorted(cpu_cases, key=lambda case: str(case["family"])):
        other = gpu.get(case["family"])
        built = case if case["source"] or other is None else other
        read = (f"`{case['family']}`", _built_as(built), _share(built), _why(built))
        lines.append(f"| {' | '.join((*read, _served(case), 'not tried' if other is None else _served(other)))} |")
    return "\n".join(lines) + "\n"


def _built_as(case: Json) -> str:
    return f"`{str(case['source']).rpartition(', ')[2]}`" if case["source"] else "not built"


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
    return f"yes: {case['difference']:.3f}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def on_cpu() -> list[Json]:
    """What was found on this project's machine without a GPU."""
    return results.cases("models", machine_name="cpu-2-cores")


def on_gpu() -> list[Json]:
    """What was found on an H100."""
    return results.cases("models", machine_name="h100-80gb-hbm3")


def problems(document: Path) -> list[str]:
    """What is wrong with the table in ``document``, in words; nothing if it is as the results say."""
    try:
        if with_part(document.read_text(), PART, table(on_cpu(), on_gpu())) != document.read_text():
            return [f"{document}: the table of models is not what the results say. Run: {PART}"]
    except ValueError as error:
        return [f"{document}: {error}"]
    return []


def write_table() -> None:
    """Make it anew."""
    write_part(DOCUMENT, PART, table(on_cpu(), on_gpu()))


def main(write: Annotated[bool, typer.Option("--write", help="Make the table anew.")] = False) -> None:
    """Check that the table is what the results say; exit with 1 and say why if it is not."""
    if write:
        write_table()
    found = problems(DOCUMENT)
    for problem in found:
        typer.echo(problem.replace(f"{PROJECT}/", ""), err=True)
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
