"""What the two sides of every trainer share, this service and the trainer's own engine: processes, steps and cases."""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal, TypeVar

import typer

from benchmarks.common import results
from benchmarks.common.command import Options
from benchmarks.common.processes import ROLLOUT_SERVICE, gpus, is_healthy, process, raise_at_sigterm, wait_until
from benchmarks.trainers.pretraining import prepare

SHAPE = "0.2b"  # of the model
PROMPTS, COMPLETIONS = 16, 8  # of a step
LEARNING_RATE = 2e-5
NUM_QUESTIONS = 4096
WARM_UP = 3  # steps that medians leave out: the first sync describes every tensor, and kernels are compiled
EDGE = 5  # steps at each end whose mean reward is reported
MEDIANS = ("step_s", "sync_s", "rollout_s", "train_s", "tokens_per_s", "k3", "probability_error")
_DONE, _LIMIT = "all steps were made", "the time was over"
Line = dict[str, float]
Side = Literal["ours", "own"]
RESULTS = {"trl": "trainers", "verl": "trainers_verl"}
"""Names of the results, by trainer."""


class SideOptions(Options):
    """What is done."""

    side: Side | None = None
    """Whose server and engine: this service's, or the trainer's own."""
    prepare: bool = False
    """Make the model at --folder."""
    report: bool = False
    """Draw the figure and write the table from the kept result."""
    folder: Path = Path(tempfile.gettempdir()) / "addition"
    """The model's."""
    steps: int = 40
    """Optimizer steps, each with rollouts of its own weights."""
    limit_s: float = 330.0
    """Seconds of one side, start included; what has been trained by then is the result."""
    port: int = 8000
    """Of the server."""
    out: Path = Path(tempfile.gettempdir()) / "trainer-benchmark"
    """Folder for logs and steps."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


Asked = TypeVar("Asked", bound=SideOptions)


@dataclass(frozen=True)
class Run:
    """The processes of one side."""

    server: Sequence[str] | None  # None: the trainer starts its engine itself, and has both GPUs
    command: Sequence[str]  # the trainer's
    environment: Mapping[str, str] = field(default_factory=dict)  # the trainer's
    line: Callable[[Any], Line] = lambda written: written  # turns what the trainer writes of a step into a step


def steps_of(folder: Path) -> Path:
    """Return the file in a side's folder to which the trainer writes a line of JSON for each step."""
    return folder / "steps.jsonl"


def perform(asked: Asked, trainer: str, processes: Callable[[Asked, Path], Run]) -> None:
    """Make the model, measure one side, or report, as asked. ``processes`` gets the folder for logs and steps."""
    if not (asked.prepare or asked.side or asked.report):
        raise typer.BadParameter("give --prepare, --side or --report")
    raise_at_sigterm()
    if asked.prepare:
        prepare(asked.folder, SHAPE, target=0.35, limit_s=110.0)
    if asked.side:
        if not (asked.folder / "config.json").is_file():
            raise typer.BadParameter(f"--folder {asked.folder}: there is no model; make it with --prepare first")
        folder = (asked.out / trainer / asked.side).absolute()
        measure(asked, trainer, folder, processes(asked, folder))
    if asked.report:
        from benchmarks.trainers import report  # a GPU host need not have matplotlib

        report.write(trainer, RESULTS[trainer])


def measure(asked: SideOptions, trainer: str, folder: Path, run: Run) -> None:
    """Run one side in an empty ``folder``, write its case, end every process.

    Raises RuntimeError if a process failed or no step was made.
    """
    here = gpus()
    if len(here) == 1:
        raise RuntimeError("one GPU is visible: two are needed, the trainer's and the server's")
    if run.server is not None and is_healthy(asked.url):
        raise RuntimeError(f"port {asked.port}: a server answers there already; end it, or give another --port")
    rmtree(folder, ignore_errors=True)  # with it goes the service's log of the run before
    folder.mkdir(parents=True)
    began, starts = time.monotonic(), dict[str, float]()
    try:
        with ExitStack() as stack:
            server = None
            if run.server is not None:
                server = stack.enter_context(_started(folder, "server", run.server, here[1:2], {}, grace_s=40))
                wait_until(lambda: is_healthy(asked.url), server, asked.limit_s, folder / "server.log")
                starts["server_s"] = round(time.monotonic() - began, 1)
            own = here[:2] if run.server is None else here[:1]
            training = stack.enter_context(_started(folder, "trainer", run.command, own, run.environment, grace_s=10))
            left_s = began + asked.limit_s - time.monotonic()
            wait_until(lambda: read_steps(steps_of(folder)), training, left_s, folder / "trainer.log")
            starts["first_step_s"] = round(time.monotonic() - began, 1)
            try:
                status = training.wait(max(0.0, began + asked.limit_s - time.monotonic()))
                ended = _DONE if status == 0 else f"the trainer ended with status {status}"
            except subprocess.TimeoutExpired:
                ended = _LIMIT
            if server is not None and server.poll() is not None:
                ended = f"the server ended with status {server.returncode}"
            lines = [run.line(written) for written in read_steps(steps_of(folder))]
        made = json.loads((asked.folder / "pretraining.json").read_text())
        case = {"trainer": trainer, "side": asked.side, "model": made["shape"]}
        case |= {"pretraining": {name: made[name] for name in ("steps", "seconds", "right")}}
        case |= {"start": starts, "ended": ended, **summarize(lines), "curves": curves(lines)}
        results.add(RESULTS[trainer], [case], ("trainer", "model", "side"))
        if ended not in (_DONE, _LIMIT):
            raise RuntimeError(f"{asked.side}: {len(lines)} steps: {ended}; the logs are in {folder}")
    except RuntimeError:
        for path in folder.glob("*.log"):
            print(f"--- the end of {path}", path.read_text(errors="replace")[-6000:], sep="\n", flush=True)
        raise


def _started(
    folder: Path, name: str, command: Sequence[str], gpus: list[str], environment: Mapping[str, str], grace_s: float
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run a process of a side on these GPUs, with its log in the side's folder."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    log = folder / f"{name}.log"
    return process(command, log, folder=folder, environment={**environment, **visible}, grace_s=grace_s)


def service_command(asked: SideOptions) -> list[str]:
    """Return the service's command, as shipped, with one replica."""
    folder = str(asked.folder.absolute())
    return [*ROLLOUT_SERVICE, "serve", folder, "--replicas", "1", "--port", str(asked.port)]


def with_rates(line: Line) -> Line:
    """Return a step with the seconds of training, and the completion tokens a second of sampling."""
    train_s = line["step_s"] - line["sync_s"] - line["rollout_s"]
    return line | {"train_s": train_s, "tokens_per_s": line["tokens"] / line["rollout_s"]}


def read_steps(file: Path) -> list[Any]:
    """Return the steps that are written to the end of their line."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def curves(lines: list[Line]) -> dict[str, list[float]]:
    """Return each number by step, to six digits."""
    return {name: [float(f"{line[name]:.6g}") for line in lines] for name in lines[0] if name != "step"}


def summarize(lines: list[Line]) -> dict[str, float]:
    """Return medians over the steps after ``WARM_UP``, and the reward at both ends."""
    warm, difference = lines[WARM_UP:] or lines, "logprob_difference"
    found = {f"median_{name}": statistics.median(line[name] for line in warm) for name in MEDIANS}
    if difference in warm[0]:  # verl does not log it
        found[difference] = statistics.fmean(line[difference] for line in warm)
    return {
        "steps": len(lines),
        **found,
        "first_reward": statistics.fmean(line["reward"] for line in lines[:EDGE]),
        "last_reward": statistics.fmean(line["reward"] for line in lines[-EDGE:]),
    }
