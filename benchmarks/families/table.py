"""The tables of docs/models.md: what ``python -m benchmarks.families`` and ``benchmarks.families.published`` found.

python -m benchmarks.families.table            says what is wrong and exits with 1 if tables and results do not agree
python -m benchmarks.families.table --write    makes the tables anew
"""

import re
from typing import Annotated

import typer

from benchmarks.common import results
from benchmarks.common.marked import check, exit_with, markdown_table, with_part
from benchmarks.common.paths import PROJECT
from benchmarks.common.results import Json

DOCUMENT = PROJECT / "docs/models.md"
PART = "python -m benchmarks.families"
PUBLISHED_PART = "python -m benchmarks.families.published"
CPU, GPU = "cpu-2-cores", "h100-80gb-hbm3"  # the machines of the results
WRITE = "python -m benchmarks.families.table --write"

_REASONS = {  # pattern of a reason why a layer stays BF16 → the word for it, which docs/models.md explains
    r"vLLM rearranges it as it loads": "rearranged",
    r"vLLM never quantizes it": "never quantized",
    r"a GPU's shard .* is no whole number of 128×128 blocks": "ragged",
    r"not of the language model": "vision",
}
_WORDS = 16  # words of an error in a cell of the table


def table(cpu_cases: list[Json], gpu_cases: list[Json]) -> str:
    """Return a line of the families without a remark, and a table with a row for each other family."""
    rows, plain = [], []
    gpu = {case["family"]: case for case in gpu_cases}
    for case in sorted(cpu_cases, key=lambda case: str(case["family"])):
        other = gpu.get(case["family"])
        built = case if case["source"] or other is None else other
        if other is None and _read(case) == "100%" and case["difference"] is not None and not case["failure"]:
            plain.append(f"`{case['family']}`")
            continue
        rows.append((f"`{case['family']}`", _read(built), _served(case), "–" if other is None else _served(other)))
    heading = ("`model_type`", "layers in FP8", "on the CPU", "on an H100")
    return f"All layers in FP8, and served on the CPU alone: {', '.join(plain)}.\n\n" + markdown_table(heading, rows)


def _read(case: Json) -> str:
    """Return the share of layers in FP8, and why not all of them."""
    if not case["source"]:
        return "not built"
    share = "" if case["fp8"] is None else f"{case['fp8']:.0%}"
    return f"{share}: {'; '.join(map(_reason, case['kept']))}" if case["kept"] else share


def _reason(text: str) -> str:
    return next((word for pattern, word in _REASONS.items() if re.fullmatch(pattern, text)), text)


def _served(case: Json) -> str:
    if case["refusal"]:
        return "no"
    if case["failure"]:
        return f"**fails**: {_cell(case['failure'])}"
    if case["difference"] is None:
        return "–"
    return f"{case['difference']:.3f}"


def _cell(text: str) -> str:
    """Return the first words of an error; the result has all of them."""
    words = text.replace("|", "\\|").split()
    return " ".join(words[:_WORDS]) + (" …" if len(words) > _WORDS else "")


def published_table(cases: list[Json]) -> str:
    """A row for each published model: what becomes FP8 of it, by how many GPUs an engine has."""
    sizes = sorted({way["gpus"] for case in cases for way in case["ways"]})
    heading = ["", "parameters", *("1 GPU" if size == 1 else f"{size} GPUs" for size in sizes)]
    rows = []
    for case in cases:
        cells = [_best([way for way in case["ways"] if way["gpus"] == size]) for size in sizes]
        rows.append([case["model"], f"{case['parameters'] / 1e9:.1f} B", *cells])
    return markdown_table(heading, rows)


def _best(ways: list[Json]) -> str:
    """Return the cell of one size: the more in FP8 the better, and expert parallelism only where it helps."""
    way = max(ways, key=lambda way: (round(way["fp8"], 2), not way["expert_parallel"]))
    if way["refusal"]:
        return f"no: {_cell(way['refusal'].partition(':')[0])}"
    return f"{way['fp8']:.0%}{', `expert_parallel`' if way['expert_parallel'] else ''}"


def write_tables() -> None:
    DOCUMENT.write_text(_page(DOCUMENT.read_text()))


def _page(page: str) -> str:
    page = with_part(page, PUBLISHED_PART, published_table(results.cases("published", machine_name=CPU)))
    return with_part(page, PART, table(*(results.cases("models", machine_name=name) for name in (CPU, GPU))))


def main(write: Annotated[bool, typer.Option("--write", help="Make the tables anew.")] = False) -> None:
    """Check that the tables are what the results say; exit with 1 and say why if it is not."""
    if write:
        write_tables()
    exit_with(check(DOCUMENT, _page, WRITE))


if __name__ == "__main__":
    typer.run(main)
