"""``rollout-service log``: list and verify a log of weight versions on disk, and roll back a service."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli.output import CaFile, TokenFile, command, complain, fail, service_at

if TYPE_CHECKING:
    from rollout_service.protocol.weights import WeightStatus
    from rollout_service.store.log import WeightLog
    from rollout_service.store.manifest import Manifest

HELP = "List and check a log of weight versions on disk, or make a service go back to an older version."
app = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)

Root = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="Folder of the log: weights.root or weights.disk_root in the configuration."),
]


@command(app)
def ls(path: Root) -> None:
    """List the versions in PATH, committed and staged; the newest is marked with a star."""
    from rollout_service.errors import RolloutServiceError
    from rollout_service.store.upload_record import read_received, read_record

    log, unread = _open_log(path), 0
    head = log.head()
    for version in log.versions():
        try:
            manifest = log.manifest(version)
        except (RolloutServiceError, OSError) as error:
            if not _is_dropped(log, version):
                unread += 1
                complain(error)
            continue
        newest = "*" if head is not None and head.version == version else " "
        typer.echo(
            f"{newest} {version:>10}  committed  {manifest.digest}  {manifest.total_bytes / 1e6:>10.1f} MB  "
            f"{len(manifest.tensors)} tensors{_label_column(manifest)}"
        )
    for parts in sorted(log.root.glob("staging/*.parts")):
        try:
            record = read_record(parts)
            present = len(read_received(parts))
        except FileNotFoundError:  # the upload has just ended
            continue
        except (RolloutServiceError, OSError) as error:
            unread += 1
            complain(error)
            continue
        if record is not None:
            label = "" if record.begin.label is None else f"  {record.begin.label}"
            typer.echo(f"  {record.begin.version:>10}  staged     {present} of {record.num_parts} parts{label}")
    if unread:
        fail(f"{unread} versions in {path} cannot be read")


@command(app)
def verify(
    path: Root,
    version: Annotated[int | None, typer.Option(help="This one alone; all committed ones by default.")] = None,
) -> None:
    """Read every byte of the versions in PATH and compare it with its digest. Exits with 1 if anything differs."""
    from rich.console import Console
    from rich.progress import Progress

    from rollout_service.errors import RolloutServiceError

    log, damaged = _open_log(path), 0
    versions, head = log.versions(), log.head()
    if version is not None:
        if version not in versions:
            there = ", ".join(map(str, versions)) or "none"
            fail(f"version {version} is not in {path}, and nothing was verified; there are versions {there}")
        versions = [version]
    elif head is not None:
        versions = sorted({*versions, head.version})  # the newest one may be missing
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for number in versions:
            try:
                manifest = log.manifest(number)
                task = progress.add_task(f"version {number}", total=manifest.total_bytes)
                log.verify(manifest, partial(progress.advance, task))
            except (RolloutServiceError, OSError) as error:
                if _is_dropped(log, number):
                    complain(f"version {number} is not needed any more, and was removed before it was verified")
                    continue
                damaged += 1
                complain(error)
            else:
                typer.echo(f"version {number}: {manifest.total_bytes} bytes are as they were committed")
    if damaged:
        fail(f"{damaged} of {len(versions)} versions in {path} are damaged")


@command(app)
def rollback(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the service.")],
    to: Annotated[str, typer.Option(metavar="VERSION", help="Number or label of a version that is kept.")],
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Make an older version the newest again, under a new number; where files can be linked, nothing is copied.

    Every replica serves that version when the command ends.
    """
    from pydantic import TypeAdapter, ValidationError

    from rollout_service.protocol.base import KnownVersion

    try:
        wanted: int | str = TypeAdapter(KnownVersion).validate_python(to)
    except ValidationError:
        fail(f"--to {to!r} is neither the number of a version nor a label")
    with service_at(url, token_file, ca_file) as client:
        status = client.rollback(wanted)
    typer.echo(f"version {status.version} is the newest: {len(status.replicas)} replicas know{_label_column(status)}")


def _label_column(version: "Manifest | WeightStatus") -> str:
    label = "" if version.label is None else f"  {version.label}"
    return label if version.rollback_of is None else f"{label}  rollback of {version.rollback_of}"


def _is_dropped(log: "WeightLog", version: int) -> bool:
    """Return True if the ingest has removed a version since it was listed; it never removes the newest."""
    head = log.head()
    return head is not None and version < head.version and version not in log.versions()


def _open_log(path: Path) -> "WeightLog":
    from rollout_service.store.log import WeightLog, log_at

    root = log_at(path)
    if not (root / "LATEST").is_file():
        fail(f"{root} is not a log of weight versions: it holds no LATEST")
    return WeightLog(root)
