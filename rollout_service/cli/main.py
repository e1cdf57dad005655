"""The ``rollout-service`` command. Commands import their dependencies inside, so that ``--help`` is fast."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import rollout_service
from rollout_service.cli import log
from rollout_service.cli.output import CaFile, TokenFile, command, complain, fail, needs_engine, problems_of, service_at

if TYPE_CHECKING:
    from pydantic import ValidationError
    from rich.table import Table

    from rollout_service.protocol.fleet import Fleet, ReplicaStatus

app = typer.Typer(
    help="Start a rollout service, and inspect one: its configuration, its replicas, the weight versions pushed to it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(log.app, name="log", short_help=log.HELP)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(rollout_service.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Handle the options before every command."""


@command(app)
def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="On the Hugging Face hub, or a folder in its layout.")],
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share one replica: engine.tensor_parallel_size.")] = 1,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="With --tp, whole experts on each GPU: engine.expert_parallel.")
    ] = False,
    replicas: Annotated[
        str | None, typer.Option(metavar="N or A-B", help="Number of replicas, or a minimum and a maximum.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="0,1", help="Indices of the GPUs for engines. Else all with enough free memory."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of HTTP, on loopback.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name in requests: model.served_name.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub: model.revision.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Write the Serve config to standard output, and start nothing.")
    ] = False,
) -> None:
    """Serve MODEL on this machine until Ctrl-C, and print how to call it.

    Serves FP8 on the machine's GPUs, as deployments/fp8_rollout.yaml does, or on the CPU without a GPU, as
    deployments/cpu_rollout.yaml does. Runs the checks of doctor first. For other settings: --print-config > FILE, edit
    FILE, serve run FILE.
    """
    import subprocess

    from rollout_service.config import ModelConfig

    with needs_engine("serve"):
        from rollout_service.cli import machine, serve
    try:
        prepared = serve.Prepared.of(
            serve.deployment(
                ModelConfig(path=model, revision=revision, served_name=name),
                on_gpus=machine.engines_on_gpus(),
                tensor_parallel_size=tp,
                expert_parallel=expert_parallel,
                replicas=None if replicas is None else serve.replica_bounds(replicas),
                port=port,
            )
        )
    except ValueError as error:
        fail(error)
    if print_config:
        for problem in prepared.wrong_model:
            complain(f"this would not start: {problem.found}")
        typer.echo(serve.as_yaml(prepared.document), nl=False)
        return
    try:
        prepared, chosen, lines = serve.keep_to_gpus(prepared, gpus)
    except (ValueError, subprocess.TimeoutExpired) as error:
        fail(error)
    if problems := prepared.problems():
        fail("\n  ".join(["this would not work, and nothing was started:", *map(str, problems)]))
    for line in (*lines, prepared.choices()):
        complain(line)
    serve.run(prepared.document, gpus=len(chosen), named=gpus is not None)


@command(app)
def config(
    path: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="A Serve config, such as those in deployments/.")],
) -> None:
    """Check the configuration in CONFIG.yaml, and print it with every default and path filled in.

    GPUs that are left out are null: they depend on the machine on which the service is started.
    """
    import yaml
    from pydantic import ValidationError

    from rollout_service.config import ServiceConfig
    from rollout_service.config.deployment_file import application_args

    try:
        resolved = ServiceConfig.model_validate(application_args(path)).resolved()
    except ValidationError as error:
        fail(_invalid(path, error))
    except ValueError as error:
        fail(error)
    typer.echo(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)


class Weights(StrEnum):
    """Values of ``quant.weights`` that quantize."""

    fp8_block = "fp8_block"
    fp8_channel = "fp8_channel"
    int8_channel = "int8_channel"


class Indivisible(StrEnum):
    """``quant.indivisible``."""

    error = "error"
    keep_bf16 = "keep_bf16"


@command(app)
def inspect(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="On the Hugging Face hub, a folder, or its config.json alone.")
    ],
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share one replica: engine.tensor_parallel_size.")] = 1,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="With --tp, whole experts on each GPU: engine.expert_parallel.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub: model.revision.")] = None,
    weights: Annotated[Weights, typer.Option(help="As quant.weights.")] = Weights.fp8_block,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="As in quant.skip; may be given again.")
    ] = None,
    indivisible: Annotated[
        Indivisible, typer.Option(help="As quant.indivisible: what to do with layers that no whole blocks fit.")
    ] = Indivisible.error,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show how MODEL is quantized: which tensors become FP8 or INT8, which do not and why, and their sizes.

    No weights are needed, and none downloaded: reads config.json, and of a folder also its tokenizer and the tensors'
    names. Fails, with the names of the layers, if MODEL does not divide into FP8 blocks, and if a folder's files do
    not fit its config.json.
    """
    from rich.console import Console

    if expert_parallel and tp == 1:
        fail("--expert-parallel shares out experts over GPUs: say over how many with --tp, or leave it out")

    from rollout_service.config import ModelConfig, QuantConfig

    with needs_engine("inspect"):
        from rollout_service.cli.inspect_model import inspect_model, print_report
    try:
        source = ModelConfig(path=model, revision=revision)
        quant = QuantConfig(weights=weights.value, skip=tuple(skip or ()), indivisible=indivisible.value)
        report = inspect_model(source, quant, tp, expert_parallel)
    except ValueError as error:
        fail(error)
    if json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, Console())


@command(app)
def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.yaml]",
            help="A Serve config that is to run here; by default the one in deployments/ for this machine.",
        ),
    ] = None,
) -> None:
    """Check this machine, and print what to set: GPUs, memory, disks, ports and certificates.

    Changes nothing. Exits with 1 if a problem would keep the service from starting.
    """
    from pydantic import ValidationError

    from rollout_service.config import deployment_file

    with needs_engine("doctor"):
        from rollout_service.cli import machine
        from rollout_service.cli.checks import Plan, problems, unknown_settings, with_model
    if path is None:
        path = deployment_file.GPU if machine.engines_on_gpus() else deployment_file.CPU
    try:
        document = deployment_file.read_document(path)
        plan, found = with_model(Plan.of(document))
    except ValidationError as error:
        fail(_invalid(path, error))
    except ValueError as error:
        fail(error)
    found += (*unknown_settings(document), *problems(plan))
    if found:
        fail("\n  ".join([f"{path} would not start on this machine:", *map(str, found)]))
    typer.echo(f"{path} can start on this machine")


@command(app)
def fleet(
    url: Annotated[str, typer.Option(help="Address of the service.")] = "http://127.0.0.1:8000",
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Show the replicas: the weight version that each serves, its load, and the time of its last update."""
    from rich.console import Console

    with service_at(url, token_file, ca_file) as client:
        table = _fleet_table(client.fleet())
    Console().print(table)


def _invalid(path: Path, error: "ValidationError") -> str:
    problems = "\n".join(f"  {line}" for line in problems_of(error))
    return f"{path} is not a valid configuration:\n{problems}"


def _fleet_table(fleet: "Fleet") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    paused = ", asleep" if fleet.asleep else ", paused" if fleet.paused else ""
    newest = escape(_version_name(fleet.latest_version, fleet.latest_label))
    table = Table(title=f"{len(fleet.replicas)} replicas; newest version {newest}{paused}")
    for name in ("replica", "state", "version"):
        table.add_column(name)
    for name in ("sequences", "closed s", "load s", "seen s ago"):
        table.add_column(name, justify="right")
    table.add_column("error")
    for replica in fleet.replicas:
        table.add_row(*_fleet_row(replica))
    table.caption = escape("\n".join([*_groups(fleet), *_adapters(fleet), *_engines(fleet)]))
    return table


def _version_name(version: int, label: str | None) -> str:
    return str(version) if label is None else f"{version} ({label})"


def _groups(fleet: "Fleet") -> list[str]:
    """Return a line for each group of pinned replicas."""
    return [
        f"group {name} is pinned to {pin.pinned_to}: "
        + ("no such version, it follows the newest" if pin.version is None else f"version {pin.version}")
        for name, pin in fleet.groups.items()
    ]


def _adapters(fleet: "Fleet") -> list[str]:
    """Return a line for each adapter version that a replica holds, and for each that it could not load."""
    reports = [(replica.replica_id, held) for replica in fleet.replicas for held in replica.adapters]
    versions = {(held.name, held.version) for _, held in reports if held.error is None}
    lines = []
    for name, version in sorted(versions):
        running = [h.running for _, h in reports if (h.name, h.version, h.error) == (name, version, None)]
        lines.append(f"adapter {name}@{version}: on {len(running)} replicas, {sum(running)} rollouts")
    failed = [(replica, held) for replica, held in reports if held.error is not None]
    return [
        *lines,
        *(f"adapter {held.name}@{held.version}: not on {replica}: {held.error}" for replica, held in failed),
    ]


def _engines(fleet: "Fleet") -> list[str]:
    """Return a line for each kind of attention and KV cache, with the reason for it, and one for failed starts."""
    attention = [each.attention for each in fleet.replicas if each.attention is not None]
    caches = [each.kv_cache.choice for each in fleet.replicas if each.kv_cache is not None]
    lines = sorted({f"attention {' and '.join(each.backends)}: {each.why}" for each in attention})
    lines += sorted({f"KV cache {choice.dtype}: {choice.why}" for choice in caches})
    if (failed := fleet.failed_starts) is not None:
        since = "; one went well since" if failed.over else ""
        first = failed.first
        lines.append(f"{failed.tries} failed starts{since}; the first, of {first.replica_id}: {first.reason}")
    return lines


def _fleet_row(replica: "ReplicaStatus") -> list[str]:
    from rich.markup import escape

    serving = "-" if replica.version is None else escape(_version_name(replica.version, replica.label))
    update = replica.update
    return [
        escape(replica.replica_id) + ("" if replica.group is None else f" ({replica.group})"),
        replica.state + (", paused" if replica.paused and replica.state != "asleep" else ""),
        serving if replica.target is None else f"{serving} → {replica.target}",
        str(replica.running),
        "-" if update is None else f"{update.closed_s:.2f}",
        "-" if update is None else f"{update.load_s:.2f}",
        f"{replica.age_s:.1f}",
        escape(replica.error or ""),
    ]
