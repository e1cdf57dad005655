"""Parts of a page that a script makes: between ``<!-- made by NAME -->`` and ``<!-- end of NAME -->``."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import typer

from benchmarks.common.paths import PROJECT


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Cells must not contain a bare ``|``."""
    return "".join(f"|{'|'.join(cells)}|\n" for cells in (heading, ["---"] * len(heading), *rows))


def with_part(page: str, name: str, part: str) -> str:
    """The page with ``part`` between the marks of ``name``. Raises ValueError if they are not there once each."""
    begin, end = f"<!-- made by {name} -->\n", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page must hold {begin.strip()!r} once, and after it {end!r} once")
    before, rest = page.split(begin)
    return before + begin + part + end + rest.split(end)[1]


def write_part(file: Path, name: str, part: str) -> None:
    """Write the page anew with that part. Raises what ``with_part`` raises."""
    file.write_text(with_part(file.read_text(), name, part))


def check(file: Path, make: Callable[[str], str], command: str) -> list[str]:
    """Return what is wrong with the page, in words; nothing if it is as ``make`` returns it, from its text."""
    page = file.read_text()
    try:
        return [] if make(page) == page else [f"{file}: its tables are not what the results say. Run: {command}"]
    except ValueError as error:
        return [f"{file}: {error}"]


def exit_with(problems: Iterable[str]) -> NoReturn:
    """Print what is wrong, and exit with 1; exit with 0 if nothing is."""
    found = list(problems)
    for problem in found:
        typer.echo(problem.replace(f"{PROJECT}/", ""), err=True)
    raise typer.Exit(1 if found else 0)
