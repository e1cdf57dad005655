"""``rollout-service serve``: create a deployment for a model on this machine from the shipped ones, and run it."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import NoReturn

import httpx
import typer
import yaml

from rollout_service.cli.checks import Plan, Problem, problems, with_model
from rollout_service.cli.output import complain, fail
from rollout_service.config import ModelConfig
from rollout_service.config.deployment_file import CPU, GPU, Document, args_of, read_document, start_options
from rollout_service.errors import RolloutServiceError
from rollout_service.gpu import nvidia_smi
from rollout_service.ingest.own_log import own_newest, recipe_of
from rollout_service.model.hub import pinned, require_room, with_model_here
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import Fleet
from rollout_service.store.log import WeightLog
from rollout_service.store.log_place import log_place, name_with_hash

_REPLICAS = re.compile(r"(\d+)(?:-(\d+))?")
_INTERRUPTED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
LOOK_S = 1.0
"""Time in seconds between two looks at a service that starts."""
REPEAT_S = 30.0
"""Time in seconds after which an unchanged line about the start is repeated."""
_ANSWER_S = 2.0
"""Timeout in seconds of one look."""


def replica_bounds(text: str) -> tuple[int, int]:
    """Parse ``2`` or ``1-4``: minimum and maximum. Raises ValueError."""
    match = _REPLICAS.fullmatch(text)
    if match is None:
        raise ValueError(f"--replicas {text}: give a number, such as 2, or a minimum and a maximum, such as 1-4")
    fewest, most = int(match[1]), int(match[2] or match[1])
    if most < max(1, fewest):
        raise ValueError(f"--replicas {text}: the maximum must be at least 1, and not below the minimum; write 1-4")
    return fewest, most


def deployment(
    model: ModelConfig,
    *,
    on_gpus: bool,
    tensor_parallel_size: int = 1,
    expert_parallel: bool = False,
    replicas: tuple[int, int] | None = None,
    port: int | None = None,
) -> Document:
    """Return a Serve config: the shipped one for GPUs or for the CPU, with this model and these settings.

    ``replicas``: minimum and maximum; None: as shipped. Each model has a log of its own.
    """
    document = read_document(GPU if on_gpus else CPU)
    args = args_of(document)
    args["model"] = {"path": str(model.path), **model.model_dump(mode="json", exclude_defaults=True)}
    args["weights"]["disk_root"] = f"out/weights-{_log_name(model)}"
    if not on_gpus:
        del args["monitor"]  # thresholds for the small model that the file is for
    if replicas is not None:
        args["scaling"] = args.get("scaling", {}) | dict(zip(("min_replicas", "max_replicas"), replicas, strict=True))
    if tensor_parallel_size > 1:
        args["engine"]["tensor_parallel_size"] = tensor_parallel_size
        if on_gpus:  # whole ones: Ray gives shares of one GPU only, so the ingest quantizes on the CPU
            args["scaling"]["num_gpus"] = tensor_parallel_size
            args["weights"]["ingest_num_gpus"] = 0
    if expert_parallel:
        args["engine"]["expert_parallel"] = True
    if port is not None:
        document["http_options"]["port"] = port
    return document


def _log_name(model: ModelConfig) -> str:
    """Return a name that another model's log does not have: other runs may have folders of the same name."""
    if model.repo_id is not None:
        return model.repo_id.replace("/", "--")
    return name_with_hash(model.path.absolute())


@dataclass(frozen=True)
class Prepared:
    """A complete deployment, before anything is started."""

    document: Document
    """Contains the current commit of the model, and a context no longer than the model's."""
    plan: Plan
    """The same, with the model in a folder of this machine; its weights may be missing there."""
    wrong_model: list[Problem]
    """The reason why the model cannot be served with these settings, if there is one."""

    @classmethod
    def of(cls, document: Document) -> "Prepared":
        """Complete ``document``; the small files of a model on the hub are downloaded.

        Raises pydantic.ValidationError, ModelNotDownloaded, FileNotFoundError, or ValueError for a model that is not a
        language model.
        """
        config = pinned(Plan.of(document).config)
        here = with_model_here(config).model
        longest = longest_context(here)
        args = args_of(document)
        if config.model.revision is not None:
            args["model"]["revision"] = config.model.revision
        if longest is not None and longest < args["engine"]["max_model_len"]:
            args["engine"]["max_model_len"] = longest
        complete = Plan.of(document)
        plan = replace(complete, config=complete.config.model_copy(update={"model": here}))
        return cls(document, *with_model(plan))

    def choices(self) -> str:
        """Return one line with the values that ``deployment`` and the model chose, and how to change them."""
        config = self.plan.config
        engine, scaling = config.engine, config.scaling
        longest = longest_context(config.model)
        of = "" if longest is None or longest <= engine.max_model_len else f" of the model's {longest}"
        return (
            f"{'engines on GPUs' if self.plan.on_gpus else 'engines on the CPU'}: a context of {engine.max_model_len} "
            f"tokens{of} (engine.max_model_len), {engine.max_num_seqs} sequences at once (engine.max_num_seqs), "
            f"{scaling.min_replicas} to {scaling.max_replicas} replicas, weights in {log_place(config).root}; "
            "for other settings: --print-config > FILE, edit FILE, serve run FILE"
        )

    def problems(self) -> list[Problem]:
        """Return all problems that would keep it from starting."""
        return [*self.wrong_model, *problems(self.plan), *([] if self.wrong_model else self._log_problems())]

    def _log_problems(self) -> list[Problem]:
        """Check that the service may continue the existing log; if that is empty, that the weights have room."""
        config, model = self.plan.config, ServedModel.of(self.plan.config.model)
        try:
            log = WeightLog(log_place(config).root)
            plan = model.plan(config.quant, config.engine.tensor_parallel_size, config.engine.expert_parallel)
            if own_newest(log, model, recipe_of(config.quant, plan), config) is None:
                require_room(Plan.of(self.document).config.model)
        except (RolloutServiceError, OSError, ValueError) as error:
            return [Problem("weights", str(error))]
        return []


def longest_context(model: ModelConfig) -> int | None:
    """Return the longest context in tokens that the model's configuration allows; None: it names none."""
    longest: int | None = getattr(ServedModel.of(model).text_config, "max_position_embeddings", None)
    return longest


def keep_to_gpus(prepared: Prepared, asked: str | None) -> tuple[Prepared, tuple[int, ...], list[str]]:
    """Choose the GPUs of engines, for this process and the Ray that it starts: ``CUDA_VISIBLE_DEVICES``.

    ``asked``: ``--gpus``; None: all with enough free memory. Return the deployment with no more replicas than fit, the
    indices of the GPUs (none for engines on the CPU, or if none is usable, which the checks report), and messages.
    Raises ValueError if one of ``asked`` does not exist or has too little memory, OSError or subprocess.TimeoutExpired
    if nvidia-smi fails.
    """
    plan = prepared.plan
    if asked is not None and not plan.on_gpus:
        raise ValueError("--gpus: engines run on the CPU here: leave it out")
    if not plan.on_gpus:
        return prepared, (), []
    if asked is not None and re.fullmatch(r"\d+(,\d+)*", asked) is None:
        raise ValueError(f"--gpus {asked}: give the indices that nvidia-smi shows, such as 0,1")
    here = nvidia_smi.visible_gpus()
    known = {gpu.index for gpu in here}
    wanted = known if asked is None else set(map(int, asked.split(",")))
    if missing := sorted(wanted - known):
        there = ", ".join(map(str, sorted(known))) or "none"
        raise ValueError(f"--gpus: this machine has no GPU {', '.join(map(str, missing))}: name some of {there}")
    in_use = nvidia_smi.find_taken(here, nvidia_smi.holders(), plan.config.engine.gpu_memory_utilization)
    if asked is not None and (wrong := [f"GPU {index}: {in_use[index]}" for index in sorted(wanted & in_use.keys())]):
        raise ValueError(f"--gpus: {'; '.join(wrong)}: end that process, or name other GPUs")
    used = tuple(sorted(wanted - in_use.keys()))
    if not used:
        return prepared, (), []
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, used))  # noqa: TID251 - Ray takes its GPUs from there
    lines = [f"engines use GPU {', '.join(map(str, used))}"]
    lines += [f"GPU {index} is left alone: {why}" for index, why in in_use.items()]
    scaling, most = plan.config.scaling, plan.most_replicas(len(used))
    if max(1, scaling.min_replicas) <= most < scaling.max_replicas:
        lines.append(f"at most {most} replicas, and not {scaling.max_replicas}: more find no GPU")
        args = args_of(prepared.document)
        args["scaling"] = args["scaling"] | {"max_replicas": most}
        scaling = scaling.model_copy(update={"max_replicas": most})
        plan = replace(plan, config=plan.config.model_copy(update={"scaling": scaling}))
    return replace(prepared, plan=plan), used, lines


def as_yaml(document: Document) -> str:
    """Return the file content for ``serve run``."""
    head = "# Made by rollout-service serve --print-config. To run it: serve run FILE\n"
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def run(document: Document, *, gpus: int = 0, named: bool = False) -> NoReturn:
    """Run the deployment in the foreground until Ctrl-C or SIGTERM, and print how to call it once it answers.

    It runs in the Ray cluster that ``ray start`` has joined this machine to, else in a new one. ``gpus``: the number of
    GPUs chosen for a new one. ``named``: True if the user chose them.
    """
    import ray
    from ray import serve

    from rollout_service.local import APPLICATION, ServiceNotStarted, deploy, start_ray

    plan, status = Plan.of(document), _INTERRUPTED
    try:
        context = start_ray(namespace="serve", num_gpus=gpus or None)
    except ServiceNotStarted as error:
        fail(error)
    except ValueError as error:  # Ray takes a number of GPUs only where it starts itself
        if named:
            fail(f"--gpus: {error} End that Ray (ray stop), or start it with CUDA_VISIBLE_DEVICES and leave --gpus out")
        context = ray.init(namespace="serve")
        there = f"Ray runs on this machine already, and gives out {ray.cluster_resources().get('GPU', 0):g} GPUs itself"
        complain(f"{there}: an engine is started on none whose memory another process holds")
    signal.signal(signal.SIGTERM, _end)
    try:
        if running := serve.status().applications:
            fail(
                f"Ray Serve runs on this machine already, with {', '.join(running)}: end it (serve shutdown), or put "
                "what rollout-service serve --print-config prints into its Serve config"
            )
        progress = progress_lines(lambda: look_at_start(plan.url, APPLICATION), complain)
        with deploy(plan.config, start_options(document), progress):
            typer.echo(how_to_call(plan, context.dashboard_url))
            status = 0
            threading.Event().wait()
    except KeyboardInterrupt:
        typer.echo("stopped")
    except (OSError, ServiceNotStarted) as error:
        fail(error)
    finally:
        ray.shutdown()
    raise typer.Exit(status)


def how_to_call(plan: Plan, dashboard: str | None) -> str:
    """Return instructions for calling the service."""
    url = plan.url
    body = json.dumps({"prompt": "1+1=", "max_tokens": 16})
    return f"""
{plan.config.model.name} is served at {url}

    curl -s {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'

    from rollout_service.client import SyncRolloutClient
    with SyncRolloutClient("{url}") as client:
        print(client.generate("1+1=", max_tokens=16).completions[0].text)

replicas    rollout-service fleet --url {url}
metrics     {url}/metrics, for Prometheus; Grafana dashboards are in dashboards/
Ray         {f"http://{dashboard}" if dashboard else "its dashboard is not running"}

Ctrl-C ends it.
"""


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(_TERMINATED)


@contextmanager
def progress_lines(
    look: Callable[[], str], say: Callable[[str], object], *, look_s: float = LOOK_S, repeat_s: float = REPEAT_S
) -> Iterator[None]:
    """Call ``say`` with the result of ``look`` after each change and every ``repeat_s``, until the block ends."""
    started, ended = time.monotonic(), threading.Event()

    def report() -> None:
        last, said_s = "", 0.0
        while not ended.wait(look_s):
            waits_for, now_s = look(), time.monotonic() - started
            if waits_for and (waits_for != last or now_s - said_s >= repeat_s):
                say(f"{now_s:.0f} s: {waits_for}")
                last, said_s = waits_for, now_s

    reporting = threading.Thread(target=report, name="start-progress", daemon=True)
    reporting.start()
    try:
        yield
    finally:
        ended.set()
        reporting.join(_ANSWER_S)


def look_at_start(url: str, application: str) -> str:
    """Return what the service at ``url`` waits for: by Serve's status, and by its fleet once a gateway answers."""
    from ray import serve
    from ray.exceptions import RayError

    try:
        app = serve.status().applications.get(application)
    except RayError as error:  # its controller has died; Ray starts another one
        return f"Ray Serve does not answer: {type(error).__name__}"
    if app is None:
        return "Ray Serve starts"
    starting = sorted(name for name, deployment in app.deployments.items() if deployment.status != "HEALTHY")
    if "gateway" not in starting:  # before, Serve's proxy would hold the request, and log that it was given up
        with suppress(httpx.TransportError):
            reply = httpx.get(f"{url}/v1/fleet", timeout=_ANSWER_S, verify=False)  # no secret is sent or read
            if reply.status_code == httpx.codes.OK:
                return engines_wait_for(Fleet.model_validate_json(reply.content))
    return f"starting: {', '.join(starting)}" if starting else ""


def engines_wait_for(fleet: Fleet) -> str:
    """Return what the first engine that does not serve waits for; "" if all serve."""
    if not fleet.replicas:
        return "the engine's process starts"
    waiting = [replica for replica in fleet.replicas if replica.state not in ("ready", "asleep")]
    if not waiting:
        return ""
    first, of = waiting[0], "" if len(fleet.replicas) == 1 else f" ({len(waiting)} of {len(fleet.replicas)} engines)"
    if first.error is not None:
        return f"{first.error}{of}"
    if first.state == "starting":
        return f"vLLM starts{of}; on a host's first start of a model it compiles for minutes"
    return f"the engine loads version {fleet.latest_version}{of}"
