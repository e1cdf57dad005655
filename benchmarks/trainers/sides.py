"""What the two sides of every trainer share, this service and the trainer's own engine: processes, steps and cases."""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

import typer

from benchmarks.common import results
from benchmarks.common.command import Options
from benchmarks.common.processes import ROLLOUT_SERVICE, gpus, is_healthy, process, raise_at_sigterm
from benchmarks.trainers.pretraining import SHAPES, prepare

PROMPTS, COMPLETIONS = 16, 8  # of a step
LEARNING_RATE = 2e-5
NUM_QUESTIONS = 4096
WARM_UP = 3  # steps that medians leave out: the first sync describes every tensor, and kernels are compiled
EDGE = 5  # steps at each end whose mean reward is reported
MEDIANS = ("step_s", "sync_s", "rollout_s", "train_s", "tokens_per_s", "k3", "probability_error")
_DONE, _LIMIT = "all steps were made", "the time was over"
Line = dict[str, float]


class SideOptions(Options):
    """What is done."""

    prepare: bool = False
    """Make the model at --folder."""
    report: bool = False
    """Draw the figure and write the table from the results of --machine."""
    folder: Path = Path(tempfile.gettempdir()) / "addition"
    """The model's."""
    model: str = "0.2b"
    """Its shape, for --prepare: 0.2b."""
    steps: int = 40
    """Optimizer steps, each with rollouts of its own weights."""
    limit_s: float = 240.0
    """Seconds of one side, start included; what has been trained by then is the result."""
    port: int = 8000
    """Of the server."""
    out: Path = Path(tempfile.gettempdir()) / "trainer-benchmark"
    """Folder for logs and steps."""
    machine: str | None = None
    """Whose results are reported; this machine's if not given."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Run:
    """The processes of one side."""

    trainer: str
    side: str
    result: str  # the name of the result that has the case
    folder: Path  # for logs and steps; emptied first
    server: Sequence[str] | None  # None: the trainer starts its engine itself, and has both GPUs
    command: Sequence[str]  # the trainer's
    environment: Mapping[str, str] = field(default_factory=dict)  # the trainer's
    is_server_first: bool = False  # start the trainer when the server answers: it does not wait for one
    line: Callable[[Any], Line] = lambda written: written  # turns what the trainer writes of a step into a step


def steps_of(folder: Path) -> Path:
    """Return the file in a side's folder to which the trainer writes a line of JSON for each step."""
    return folder / "steps.jsonl"


def folder_of(asked: SideOptions, trainer: str, side: str) -> Path:
    """Return the folder of one side."""
    return (asked.out / trainer / side).absolute()


def perform(asked: SideOptions, trainer: str, result: str, run: Callable[[], Run] | None) -> None:
    """Make the model, measure one side, or report, as asked."""
    if not (asked.prepare or run or asked.report):
        raise typer.BadParameter("give --prepare, --side or --report")
    if asked.model not in SHAPES:
        raise typer.BadParameter(f"--model {asked.model}: give one of {', '.join(SHAPES)}")
    raise_at_sigterm()
    if asked.prepare:
        prepare(asked.folder, asked.model, target=0.35, limit_s=110.0)
    if run:
        if not (asked.folder / "config.json").is_file():
            raise typer.BadParameter(f"--folder {asked.folder}: there is no model; make it with --prepare first")
        measure(asked, run())
    if asked.report:
        from benchmarks.trainers import report  # a GPU host need not have matplotlib

        machine = asked.machine or results.machine()
        report.write(results.cases(result, machine_name=asked.machine), trainer, machine)


def measure(asked: SideOptions, run: Run) -> None:
    """Run one side, write its case, end every process. Raises RuntimeError if a process failed or no step was made."""
    here = gpus()
    if len(here) == 1:
        raise RuntimeError("one GPU is visible: two are needed, the trainer's and the server's")
    if run.server is not None and is_healthy(asked.url):
        raise RuntimeError(f"port {asked.port}: a server answers there already; end it, or give another --port")
    rmtree(run.folder, ignore_errors=True)  # with it goes the service's log of the run before
    run.folder.mkdir(parents=True)
    watch = Watch(run, asked)
    with ExitStack() as stack:
        if run.server is not None:
            gpu = {"CUDA_VISIBLE_DEVICES": here[1]} if here else {}
            watch.server = stack.enter_context(
                process(run.server, run.folder / "server.log", folder=run.folder, environment=gpu, grace_s=40)
            )
            if run.is_server_first and (ended := watch.wait(lambda: "server_s" in watch.starts)):
                log = (run.folder / "server.log").read_text(errors="replace")
                raise RuntimeError(f"{run.side}: no server: {ended}; the end of its log:\n{log[-6000:]}")
        own = here[:1] if run.server is not None else here[:2]
        environment = {**run.environment, **({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {})}
        watch.trainer = stack.enter_context(
            process(run.command, run.folder / "trainer.log", folder=run.folder, environment=environment, grace_s=10)
        )
        ended = watch.wait(lambda: False)
        if watch.lines:
            made = json.loads((asked.folder / "pretraining.json").read_text())
            case = {"trainer": run.trainer, "side": run.side, "model": made["shape"]}
            case |= {"pretraining": {name: made[name] for name in ("steps", "seconds", "right")}}
            case |= {"start": watch.starts, "ended": ended, **summarize(watch.lines), "curves": curves(watch.lines)}
            results.add(run.result, [case], ("trainer", "model", "side"))
    if not watch.lines or ended not in (_DONE, _LIMIT):
        for path in run.folder.glob("*.log"):
            print(f"--- the end of {path}", path.read_text(errors="replace")[-6000:], sep="\n", flush=True)
        raise RuntimeError(f"{run.side}: {len(watch.lines)} steps: {ended}; the logs are in {run.folder}")


@dataclass
class Watch:
    """A run as it goes on, told line by line."""

    run: Run
    asked: SideOptions
    server: subprocess.Popen[bytes] | None = None
    trainer: subprocess.Popen[bytes] | None = None
    started: float = field(default_factory=time.monotonic)
    starts: dict[str, float] = field(default_factory=dict)  # seconds until the server answered, and to the first step
    lines: list[Line] = field(default_factory=list)  # of all steps so far

    def wait(self, reached: Callable[[], bool]) -> str:
        """Return "" once it is reached, or how the run has ended before."""
        while not reached():
            ended = self._ended()
            self._look()  # after the processes: what they wrote to the end is seen
            if ended is not None or time.monotonic() - self.started > self.asked.limit_s:
                return "" if reached() else ended or _LIMIT
            time.sleep(0.2)
        return ""

    def _ended(self) -> str | None:
        if self.trainer is not None and (status := self.trainer.poll()) is not None:
            return _DONE if status == 0 else f"the trainer ended with status {status}"
        if self.server is not None and (status := self.server.poll()) is not None:
            return f"the server ended with status {status}"
        return None

    def _look(self) -> None:
        took_s, side = time.monotonic() - self.started, self.run.side
        if self.server is not None and "server_s" not in self.starts and is_healthy(self.asked.url):
            self.starts["server_s"] = round(took_s, 1)
            print(f"{side}: the server answers after {took_s:.1f} s", flush=True)
        told, self.lines = len(self.lines), [self.run.line(each) for each in read_steps(steps_of(self.run.folder))]
        for line in self.lines[told:]:
            self.starts.setdefault("first_step_s", round(took_s, 1))
            print(f"{side}: {results.brief(line)}", flush=True)


def service_command(asked: SideOptions) -> list[str]:
    """Return the service's command, as shipped, with one replica."""
    folder = str(asked.folder.absolute())
    return [*ROLLOUT_SERVICE, "serve", folder, "--replicas", "1", "--port", str(asked.port)]


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
