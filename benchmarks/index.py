"""Check that benchmarks/README.md names every benchmark and every kept result.

python -m benchmarks.index
"""

import re
from collections.abc import Iterator
from pathlib import Path

import typer

from benchmarks.common.marked import exit_with
from benchmarks.common.paths import PROJECT, RESULTS

README = PROJECT / "benchmarks/README.md"


def problems(page: str, folder: Path) -> Iterator[str]:
    """Yield a sentence for each command of ``page`` without a module and each result in ``folder`` without a row."""
    for module in re.findall(r"python -m (benchmarks\.[\w.]+)", page):
        path = PROJECT / module.replace(".", "/")
        if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()):
            yield f"benchmarks/README.md: {module} does not exist; remove its row"
    names = re.findall(r"\| ?`(\w+)` ?\|$", page, re.MULTILINE)
    for file in sorted(folder.glob("*/*.json")):
        if not any(re.fullmatch(rf"{name}(_\w+)?", file.stem) for name in names):
            yield f"benchmarks/README.md: {file.parent.name}/{file.name} has no row; add one, or delete the result"


def main() -> None:
    """Print what is wrong and exit with 1; exit with 0 if nothing is."""
    exit_with(problems(README.read_text(), RESULTS))


if __name__ == "__main__":
    typer.run(main)
