"""Errors of the ``rollout-service`` commands in plain words."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast

import typer

from rollout_service.errors import RolloutServiceError

if TYPE_CHECKING:
    from pydantic import ValidationError

    from rollout_service.client import SyncRolloutClient

Command = TypeVar("Command", bound=Callable[..., Any])
TokenFile = Annotated[Path | None, typer.Option(help="File that holds the bearer token.")]
CaFile = Annotated[Path | None, typer.Option(help="File of the authorities to trust an https address by.")]


def complain(message: object) -> None:
    """Write ``message`` to standard error, with the command's name."""
    if isinstance(message, ValueError):
        from pydantic import ValidationError  # not for --help

        if isinstance(message, ValidationError):
            message = "; ".join(problems_of(message))
    typer.echo(f"rollout-service: {message}", err=True)


def fail(message: object) -> NoReturn:
    """Write ``message`` to standard error, and end the command with exit status 1."""
    complain(message)
    raise typer.Exit(1)


@contextmanager
def needs_engine(command: str) -> Iterator[None]:
    """Name the package to install if an import within the context finds no engine."""
    try:
        yield
    except ModuleNotFoundError as error:
        fail(f"{command} needs {error.name}, which comes with an engine: install rollout-service[cpu] or [gpu]")


@contextmanager
def service_at(url: str, token_file: Path | None, ca_file: Path | None) -> "Iterator[SyncRolloutClient]":
    """Connect to a service; the command fails with the error of any request within the context.

    A RolloutServiceError is left to ``command``.
    """
    import httpx

    from rollout_service.client import SyncRolloutClient

    try:
        with SyncRolloutClient(url, token=_read_token(token_file), retries=1, ca_file=ca_file) as client:
            yield client
    except ValueError as error:
        fail(error)
    except httpx.TransportError as error:
        fail(error)


def _read_token(file: Path | None) -> str | None:
    from rollout_service.protocol.base import is_token

    if file is None:
        return None
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read the token: {error}")
    if not token:
        fail(f"the token file {file} is empty")
    if not is_token(token):
        fail(f"the token file {file} is not one word of printable ASCII: write the token alone into it")
    return token


def problems_of(error: "ValidationError") -> list[str]:
    """Return one line for each error: field, problem, and the given value (but never a secret)."""
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in problem["loc"]) or "configuration"
        if problem["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown field{_fields_beside(problem['loc'])}")
            continue
        given = problem["input"]
        quoted = isinstance(given, str | int | float | None) and "auth" not in problem["loc"]
        lines.append(
            f"{where}: {problem['msg'].removeprefix('Value error, ')}" + (f", not {given!r}" if quoted else "")
        )
    return lines


def _fields_beside(location: tuple[int | str, ...]) -> str:
    from rollout_service.config import ServiceConfig
    from rollout_service.config.engine import Config

    section: type[Config] = ServiceConfig
    for name in location[:-1]:
        field = section.model_fields.get(str(name))
        kind = None if field is None else field.annotation
        if not (isinstance(kind, type) and issubclass(kind, Config)):
            return ""
        section = kind
    return f"; there are {', '.join(section.model_fields)}"


def command(app: typer.Typer) -> Callable[[Command], Command]:
    """Return a decorator that adds a command whose help is wrapped in the list of commands, not truncated.

    An error of the service, or of a file, ends the command with exit status 1 and one line, not with a traceback.
    """

    def add(function: Command) -> Command:
        first = (function.__doc__ or "").split("\n\n")[0]

        @functools.wraps(function)
        def run(*args: object, **options: object) -> object:
            try:
                return function(*args, **options)
            except BrokenPipeError:  # of ``| head``: typer ends quietly
                raise
            except (OSError, RolloutServiceError) as error:
                if isinstance(error, FileNotFoundError) and error.filename is None and not _has_folder():
                    fail("the current folder does not exist any more: change to another one (cd)")
                fail(error)

        return cast(Command, app.command(short_help=" ".join(first.split()))(run))

    return add


def _has_folder() -> bool:
    """Return True if this process's current folder exists."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True
