"""``rollout-service log``: look at a log of weight versions on disk, check it, make room in it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli.output import complain, fail

if TYPE_CHECKING:
    from rollout_service.store.log import WeightLog

app = typer.Typer(
    help="List, check and prune a log of weight versions on disk: weights.root of a service.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Root = Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the log: weights.root in the configuration.")]


@app.command()
def ls(path: Root) -> None:
    """List the versions in PATH, committed and staged; the newest is marked with a star."""
    from rollout_service.errors import RolloutServiceError
    from rollout_service.store.upload_record import read_record

    log = _opened(path)
    try:
        head = log.head()
        for version in log.versions():
            manifest = log.manifest(version)
            newest = "*" if head is not None and head.version == version else " "
            typer.echo(
                f"{newest} {version:>10}  committed  {manifest.digest}  {manifest.total_bytes / 1e6:>10.1f} MB  "
                f"{len(manifest.tensors)} tensors"
            )
        for parts in sorted(path.glob("staging/*.parts")):
            record = read_record(parts)
            if record is not None:
                present = len(list(parts.glob("part-*")))
                typer.echo(f"  {record.begin.version:>10}  staged     {present} of {record.num_parts} parts")
    except (RolloutServiceError, OSError) as error:
        fail(error)


@app.command()
def verify(
    path: Root,
    version: Annotated[int | None, typer.Option(help="This one alone; all committed ones by default.")] = None,
) -> None:
    """Read every byte of the versions in PATH and compare it with its digest. Exits with 1 if anything differs."""
    from rich.console import Console
    from rich.progress import Progress

    from rollout_service.errors import RolloutServiceError

    log, damaged = _opened(path), 0
    try:
        versions = log.versions() if version is None else [version]
    except RolloutServiceError as error:
        fail(error)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for number in versions:
            try:
                manifest = log.manifest(number)
                task = progress.add_task(f"version {number}", total=manifest.total_bytes)
                log.verify(manifest, partial(progress.advance, task))
            except (RolloutServiceError, OSError) as error:
                damaged += 1
                complain(error)
            else:
                typer.echo(f"version {number}: {manifest.total_bytes} bytes are as they were committed")
    if damaged:
        fail(f"{damaged} of {len(versions)} versions in {path} are damaged")


@app.command()
def gc(
    path: Root,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest versions stay.")] = 2,
) -> None:
    """Remove all but the newest versions in PATH, and what crashes left. Staged uploads stay.

    Refuses while a service writes the log: that one knows which versions its replicas read, and removes the others by
    itself (weights.keep_versions).
    """
    from rollout_service.errors import RolloutServiceError
    from rollout_service.store.durable_io import WriterLock

    log = _opened(path)
    try:
        with WriterLock(path).acquire(0):
            log.remove_uncommitted()
            versions = log.versions()
            for number in versions[:-keep]:
                log.drop(number)
                typer.echo(f"version {number} is removed")
            typer.echo(f"{len(versions[-keep:])} versions are kept")
    except (RolloutServiceError, OSError) as error:
        fail(error)


def _opened(path: Path) -> "WeightLog":
    from rollout_service.store.log import WeightLog

    if not (path / "LATEST").is_file():
        fail(f"{path} is not a log of weight versions: it holds no LATEST")
    return WeightLog(path)
