"""How the commands of ``rollout-service`` say what is wrong."""

from typing import NoReturn

import typer


def complain(message: object) -> None:
    """Write ``message`` to standard error, under the command's name."""
    typer.echo(f"rollout-service: {message}", err=True)


def fail(message: object) -> NoReturn:
    """Complain, and end the command with exit status 1."""
    complain(message)
    raise typer.Exit(1)
