"""Options in groups: what a command is given, what it shows, and what it refuses."""

from enum import StrEnum
from typing import Annotated

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from benchmarks.common.command import Options, spread


class Side(StrEnum):
    LEFT = "left"
    RIGHT = "right"


class Size(Options):
    """The size.

    Not shown.
    """

    rows: int = Field(default=2, ge=1)
    """How many there are."""
    side: tuple[Side, ...] = (Side.LEFT,)
    free: bool = False


class Name(Options):
    """The name."""

    title: str


def call(*arguments: str) -> tuple[int, str, list[object]]:
    """Exit status, output, and what the command was called with."""
    seen: list[object] = []

    def main(size: Size, name: Name, repeats: Annotated[int, typer.Option(help="So often.")] = 3) -> None:
        """What it does."""
        seen.extend((size, name, repeats))

    app = typer.Typer()
    app.command()(spread(main))
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})
    return result.exit_code, result.output, seen


def test_each_field_is_an_option() -> None:
    options = ("--rows", "4", "--side", "right", "--side", "left", "--free", "--title", "x", "--repeats", "5")
    assert call(*options)[2] == [Size(rows=4, side=(Side.RIGHT, Side.LEFT), free=True), Name(title="x"), 5]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "0", "--title", "x"), "--rows: Input should be greater than or equal to 1"),
        (("--side", "up", "--title", "x"), "--side"),
        ((), "--title"),
    ],
)
def test_what_is_wrong_is_a_usage_error(arguments: tuple[str, ...], said: str) -> None:
    status, output, seen = call(*arguments)
    assert (status, seen) == (2, [])
    assert said in " ".join(output.replace("│", " ").split())


def test_a_name_in_two_groups_is_refused() -> None:
    class Other(Options):
        """Something else."""

        rows: int = 1

    def main(size: Size, other: Other) -> None: ...

    with pytest.raises(ValueError, match="rows"):
        spread(main)
