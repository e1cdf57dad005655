"""How the commands of ``rollout-service`` say what is wrong."""

from pathlib import Path
from typing import NoReturn

import typer


def complain(message: object) -> None:
    """Write ``message`` to standard error, under the command's name."""
    typer.echo(f"rollout-service: {message}", err=True)


def fail(message: object) -> NoReturn:
    """Complain, and end the command with exit status 1."""
    complain(message)
    raise typer.Exit(1)


def read_token(file: Path | None) -> str | None:
    """The bearer token in a file; None without one. Ends the command if it cannot be read."""
    if file is None:
        return None
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read the token: {error}")
    if not token:
        fail(f"the token file {file} is empty")
    return token
