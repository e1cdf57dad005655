"""TRL's GRPOTrainer in server mode, unmodified: through this service as it is shipped, and with TRL's own server.

    python -m benchmarks.trainers.trl --prepare --folder F        makes the model: two minutes on a GPU
    python -m benchmarks.trainers.trl --side ours --folder F      then --side own, and --side own-fp8
    python -m benchmarks.trainers.trl --report                    docs/trainers/trl.png and the table of its page

Two GPUs, the first two of CUDA_VISIBLE_DEVICES: the trainer has one, the server the other. Each side is a case of
benchmarks/results/<machine>/trainers.json. Without a GPU, ``--side ours`` runs over gloo with `--model tiny`.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal

import typer

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.processes import ROLLOUT_SERVICE, gpus, is_healthy, process, raise_at_sigterm
from benchmarks.trainers.pretraining import SHAPES, prepare
from benchmarks.trainers.trl_training import Place, Training

WARM_UP = 3
"""Steps that medians leave out: the first sync describes every tensor, and kernels are compiled."""
EDGE = 5
"""Steps at each end whose mean reward is reported."""
_TRL_SERVE = [sys.executable, "-m", "trl.scripts.vllm_serve"]
_DONE, _LIMIT = "all steps were made", "the time was over"
Side = Literal["ours", "own", "own-fp8"]


class TrlOptions(Options):
    """What is done."""

    prepare: bool = False
    """Make the model at --folder."""
    side: Side | None = None
    """Whose server: this service's, TRL's, or TRL's with vLLM's own FP8."""
    report: bool = False
    """Draw the figure and write the table from the results of --machine."""
    folder: Path = Path(tempfile.gettempdir()) / "addition"
    """The model's."""
    model: str = "0.2b"
    """Its shape, for --prepare: 0.2b, qwen3-0.6b or tiny."""
    pretrain_s: float = 110.0
    """Seconds of pre-training at most."""
    right: float = 0.35
    """Probability of a right answer at which pre-training ends."""
    limit_s: float = 240.0
    """Seconds of one side, start included; what has been trained by then is the result."""
    port: int = 8000
    """Of the server."""
    out: Path = Path(tempfile.gettempdir()) / "trl-benchmark"
    """Folder for logs and steps."""
    machine: str | None = None
    """Whose results are reported; this machine's if not given."""


def main(asked: TrlOptions, training: Training) -> None:
    """Make the model, run one side, or report."""
    if not (asked.prepare or asked.side or asked.report):
        raise typer.BadParameter("give --prepare, --side or --report")
    if asked.model not in SHAPES:
        raise typer.BadParameter(f"--model {asked.model}: give one of {', '.join(SHAPES)}")
    raise_at_sigterm()
    if asked.prepare:
        prepare(asked.folder, asked.model, target=asked.right, limit_s=asked.pretrain_s)
    if asked.side:
        if not (asked.folder / "config.json").is_file():
            raise typer.BadParameter(f"--folder {asked.folder}: there is no model; make it with --prepare first")
        measure(asked, asked.side, training)
    if asked.report:
        from benchmarks.trainers import report  # a GPU host need not have matplotlib

        report.write(results.cases("trainers", machine_name=asked.machine), asked.machine or results.machine())


def measure(asked: TrlOptions, side: Side, training: Training) -> None:
    """Run one side, write its case, end every process. Raises RuntimeError if a process failed or no step was made."""
    here, url = gpus(), f"http://127.0.0.1:{asked.port}"
    if len(here) == 1:
        raise RuntimeError("one GPU is visible: NCCL needs two, the trainer's and the server's")
    if is_healthy(url):
        raise RuntimeError(f"port {asked.port}: a server answers there already; end it, or give another --port")
    folder = (asked.out / side).absolute()
    rmtree(folder, ignore_errors=True)  # with it goes the service's log of the run before
    folder.mkdir(parents=True)
    logs = {name: folder / f"{name}.log" for name in ("server", "trainer")}
    trainer_gpu, server_gpu = ({"CUDA_VISIBLE_DEVICES": gpu} for gpu in here[:2]) if here else ({}, {})
    watch = Watch(side, url, folder / "steps.jsonl")
    place = Place(folder=asked.folder.absolute(), url=url, server_limit_s=asked.limit_s, out=watch.file)
    with (
        process(
            server_command(side, asked), logs["server"], folder=folder, environment=server_gpu, grace_s=40
        ) as server,
        process(
            trainer_command(training, place), logs["trainer"], folder=folder, environment=trainer_gpu, grace_s=10
        ) as trainer,
    ):
        ended = watch.until_over(trainer, server, asked.limit_s)
        case = {**common(asked.folder, side), "settings": training.model_dump(), "start": watch.starts, "ended": ended}
        case |= {**summarize(watch.lines), "curves": curves(watch.lines)}
        if side == "ours" and is_healthy(url):
            case["fleet"] = _fleet(url)
        if watch.lines:
            found = results.joined(results.cases("trainers"), [case], ("trainer", "model", "side"))
            print(results.write("trainers", {"cases": found}), flush=True)
    print(json.dumps({name: value for name, value in case.items() if name not in ("curves", "fleet")}), flush=True)
    if not watch.lines or ended not in (_DONE, _LIMIT):
        for log in logs.values():
            print(f"--- the end of {log}", log.read_text(errors="replace")[-6000:], sep="\n", flush=True)
        raise RuntimeError(f"{side}: {len(watch.lines)} of {training.steps} steps: {ended}; the logs are in {folder}")


@dataclass
class Watch:
    """A run as it goes on, told line by line."""

    side: Side
    url: str
    file: Path
    """Of steps; the trainer writes it."""
    starts: dict[str, float] = field(default_factory=dict)
    """Seconds from the start until the server answered, and until the first step was seen."""
    lines: list[dict[str, float]] = field(default_factory=list)
    """Of all steps so far."""

    def until_over(self, trainer: subprocess.Popen[bytes], server: subprocess.Popen[bytes], limit_s: float) -> str:
        """Wait until one of them ends or the time is over; return which."""
        started = time.monotonic()
        while True:
            took_s, ended = time.monotonic() - started, _ended(trainer, server)
            self._look(took_s)  # after the processes: what they wrote to the end is seen
            if ended is not None or took_s > limit_s:
                return ended or _LIMIT
            time.sleep(0.2)

    def _look(self, took_s: float) -> None:
        if "server_s" not in self.starts and is_healthy(self.url):
            self.starts["server_s"] = round(took_s, 1)
            print(f"{self.side}: the server answers after {took_s:.1f} s", flush=True)
        told, self.lines = len(self.lines), read_steps(self.file)
        for line in self.lines[told:]:
            self.starts.setdefault("first_step_s", round(took_s, 1))
            print(f"{self.side}: {tell(line)}", flush=True)


def _ended(trainer: subprocess.Popen[bytes], server: subprocess.Popen[bytes]) -> str | None:
    """Return how the run has ended; None while it goes on."""
    if (status := trainer.poll()) is not None:
        return _DONE if status == 0 else f"the trainer ended with status {status}"
    if (status := server.poll()) is not None:
        return f"the server ended with status {status}"
    return None


def server_command(side: Side, asked: TrlOptions) -> list[str]:
    """Return what each side's documentation has users type."""
    folder, port = str(asked.folder.absolute()), str(asked.port)
    if side == "ours":
        return [*ROLLOUT_SERVICE, "serve", folder, "--replicas", "1", "--port", port]
    quantized = ["--quantization", "fp8"] if side == "own-fp8" else []  # handed on to vllm serve
    return [*_TRL_SERVE, "--model", folder, "--port", port, *quantized]


def trainer_command(training: Training, place: Place) -> list[str]:
    """Return the trainer's command: the same for every side."""
    given = {**training.model_dump(), **place.model_dump()}
    options = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "benchmarks.trainers.trl_training", *options]


def read_steps(file: Path) -> list[dict[str, float]]:
    """Return the steps that are written to the end of their line."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def tell(line: dict[str, float]) -> str:
    """Return a step in a line."""
    seconds = ", ".join(f"{name.removesuffix('_s')} {line[name]:.2f} s" for name in ("sync_s", "rollout_s", "train_s"))
    return f"step {line['step']:.0f}: {seconds}, {line['tokens_per_s']:.0f} tokens/s, reward {line['reward']:.2f}"


def curves(lines: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return each number by step, to six digits."""
    names = [name for name in lines[0] if name != "step"] if lines else []
    return {name: [float(f"{line[name]:.6g}") for line in lines] for name in names}


def summarize(lines: list[dict[str, float]]) -> dict[str, float]:
    """Return medians over the steps after ``WARM_UP``, and the reward at both ends."""
    warm = lines[WARM_UP:] or lines
    if not warm:
        return {"steps": 0}
    medians = ("step_s", "sync_s", "rollout_s", "train_s", "tokens_per_s", "k3", "probability_error")
    return {
        "steps": len(lines),
        **{f"median_{name}": statistics.median(line[name] for line in warm) for name in medians},
        "logprob_difference": statistics.fmean(line["logprob_difference"] for line in warm),
        "first_reward": statistics.fmean(line["reward"] for line in lines[:EDGE]),
        "last_reward": statistics.fmean(line["reward"] for line in lines[-EDGE:]),
    }


def common(folder: Path, side: Side) -> dict[str, Any]:
    """Return what a case is of."""
    made = json.loads((folder / "pretraining.json").read_text())
    reached = {name: made[name] for name in ("steps", "seconds", "right")}
    return {"trainer": "trl", "side": side, "model": made["shape"], "pretraining": reached}


def _fleet(url: str) -> Any:
    """Return what the service says of its replicas and their last update."""
    from rollout_service.client import SyncRolloutClient

    with SyncRolloutClient(url) as client:
        return client.fleet().model_dump(mode="json")


if __name__ == "__main__":
    run(main)
