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
from benchmarks.trainers.addition import MAX_TOKENS
from benchmarks.trainers.pretraining import SHAPES, prepare

WARM_UP = 3
"""Steps that medians leave out: the first sync describes every tensor, and kernels are compiled."""
EDGE = 5
"""Steps at each end whose mean reward is reported."""
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
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"


class TrainingOptions(Options):
    """What is trained; all sides train the same prompts in the same order."""

    steps: int = 40
    """Optimizer steps, each with rollouts of its own weights."""
    prompts: int = 16
    """Of a step."""
    completions: int = 8
    """Of a prompt."""
    max_tokens: int = MAX_TOKENS
    """Of a completion."""
    learning_rate: float = 2e-5
    """Constant."""


@dataclass(frozen=True)
class Run:
    """The processes of one side."""

    trainer: str
    side: str
    result: str
    """The name of the result that has the case."""
    settings: dict[str, Any]
    """Of the trainer, for the case."""
    folder: Path
    """For logs and steps; emptied first."""
    server: Sequence[str] | None
    """The server's command; None: the trainer starts its engine itself, and has both GPUs."""
    command: Sequence[str]
    """The trainer's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The trainer's."""
    is_server_first: bool = False
    """Start the trainer when the server answers: it does not wait for one."""
    line: Callable[[Any], Line] = lambda written: written
    """Turns what the trainer writes of a step, a line of JSON in ``steps``, into a step."""

    @property
    def steps(self) -> Path:
        """Return the file to which the trainer writes a line for each step."""
        return steps_of(self.folder)


def steps_of(folder: Path) -> Path:
    """Return the file of steps in a side's folder."""
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
    watch = Watch(run, asked.url, asked.limit_s)
    with ExitStack() as stack:
        if run.server is not None:
            gpu = {"CUDA_VISIBLE_DEVICES": here[1]} if here else {}
            watch.server = stack.enter_context(
                process(run.server, run.folder / "server.log", folder=run.folder, environment=gpu, grace_s=40)
            )
        if run.server is not None and run.is_server_first:
            watch.until_server_answers()
        own = here[:1] if run.server is not None else here[:2]
        environment = {**run.environment, **({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {})}
        watch.trainer = stack.enter_context(
            process(run.command, run.folder / "trainer.log", folder=run.folder, environment=environment, grace_s=10)
        )
        ended = watch.until_over()
        case = {**common(asked.folder, run), "settings": run.settings, "start": watch.starts, "ended": ended}
        case |= {**summarize(watch.lines), "curves": curves(watch.lines)}
        if run.side == "ours" and is_healthy(asked.url):
            case["fleet"] = _fleet(asked.url)
        if watch.lines:
            results.add(run.result, [case], ("trainer", "model", "side"))
    if not watch.lines or ended not in (_DONE, _LIMIT):
        for log in run.folder.glob("*.log"):
            print(f"--- the end of {log}", log.read_text(errors="replace")[-6000:], sep="\n", flush=True)
        raise RuntimeError(f"{run.side}: {len(watch.lines)} steps: {ended}; the logs are in {run.folder}")


@dataclass
class Watch:
    """A run as it goes on, told line by line."""

    run: Run
    url: str
    limit_s: float
    server: subprocess.Popen[bytes] | None = None
    trainer: subprocess.Popen[bytes] | None = None
    started: float = field(default_factory=time.monotonic)
    starts: dict[str, float] = field(default_factory=dict)
    """Seconds from the start until the server answered, and until the first step was seen."""
    lines: list[Line] = field(default_factory=list)
    """Of all steps so far."""

    def until_server_answers(self) -> None:
        """Wait for the server. Raises RuntimeError if it ends, or the time is over."""
        if ended := self._wait(lambda: "server_s" in self.starts):
            log = (self.run.folder / "server.log").read_text(errors="replace")
            raise RuntimeError(f"{self.run.side}: no server: {ended}; the end of its log:\n{log[-6000:]}")

    def until_over(self) -> str:
        """Wait until a process ends or the time is over; return which."""
        return self._wait(lambda: False)

    def _wait(self, reached: Callable[[], bool]) -> str:
        """Return "" once it is reached, or how the run has ended before."""
        while not reached():
            ended = self._ended()
            self._look()  # after the processes: what they wrote to the end is seen
            if ended is not None or time.monotonic() - self.started > self.limit_s:
                return "" if reached() else ended or _LIMIT
            time.sleep(0.2)
        return ""

    def _ended(self) -> str | None:
        """Return how the run has ended; None while it goes on."""
        if self.trainer is not None and (status := self.trainer.poll()) is not None:
            return _DONE if status == 0 else f"the trainer ended with status {status}"
        if self.server is not None and (status := self.server.poll()) is not None:
            return f"the server ended with status {status}"
        return None

    def _look(self) -> None:
        took_s, side = time.monotonic() - self.started, self.run.side
        if self.server is not None and "server_s" not in self.starts and is_healthy(self.url):
            self.starts["server_s"] = round(took_s, 1)
            print(f"{side}: the server answers after {took_s:.1f} s", flush=True)
        told, self.lines = len(self.lines), [self.run.line(written) for written in read_steps(self.run.steps)]
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
    names = [name for name in lines[0] if name != "step"] if lines else []
    return {name: [float(f"{line[name]:.6g}") for line in lines] for name in names}


def summarize(lines: list[Line]) -> dict[str, float]:
    """Return medians over the steps after ``WARM_UP``, and the reward at both ends."""
    warm = lines[WARM_UP:] or lines
    if not warm:
        return {"steps": 0}
    return {
        "steps": len(lines),
        **{f"median_{name}": statistics.median(line[name] for line in warm) for name in MEDIANS},
        **{
            name: statistics.fmean(line[name] for line in warm)
            for name in ("logprob_difference",)
            if name in warm[0]  # verl does not log it
        },
        "first_reward": statistics.fmean(line["reward"] for line in lines[:EDGE]),
        "last_reward": statistics.fmean(line["reward"] for line in lines[-EDGE:]),
    }


def common(folder: Path, run: Run) -> dict[str, Any]:
    """Return what a case is of."""
    made = json.loads((folder / "pretraining.json").read_text())
    reached = {name: made[name] for name in ("steps", "seconds", "right")}
    return {"trainer": run.trainer, "side": run.side, "model": made["shape"], "pretraining": reached}


def _fleet(url: str) -> Any:
    """Return what the service says of its replicas and their last update."""
    from rollout_service.client import SyncRolloutClient

    with SyncRolloutClient(url) as client:
        return client.fleet().model_dump(mode="json")
