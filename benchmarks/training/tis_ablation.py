"""What TIS does when rollouts are in FP8: the same training in BF16, in FP8 with and without a correction, and others.

    python -m benchmarks.training.tis_ablation --publish                            digits, on a CPU, 40 minutes
    python -m benchmarks.training.tis_ablation --task addition --prepare            makes the model, on a GPU
    python -m benchmarks.training.tis_ablation --task addition --arms fp8 …         an arm on one GPU
    python -m benchmarks.training.tis_ablation --task addition --report --publish   of all runs below --out

Each arm is the loop of ``examples.grpo`` from the same weights with the same questions; arms differ in the rollout
engine, in the correction and in how the policy is computed. They run one after the other, on one service for all arms
with the same engine, whose weight versions go on from run to run. Every step is written below ``--out`` as it ends, and
``--resume`` goes on with the runs that have not ended. docs/tis_ablation.md has the results; docs/kv_cache.md those of
the arms that sample batches ahead, so that rollouts run over updates.
"""

import functools
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import typer
from pydantic import Field
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import results
from benchmarks.common.command import Options
from benchmarks.common.command import run as run_command
from benchmarks.common.gpu_service import laid_over
from benchmarks.common.marked import write_part
from benchmarks.common.paths import CPU_DEPLOYMENT, PROJECT, SHARED_MEMORY
from benchmarks.common.processes import raise_at_sigterm
from benchmarks.trainers.addition import Size
from benchmarks.trainers.pretraining import prepare
from benchmarks.training import kv_cache_report, overlapped
from benchmarks.training.ablation_report import Run, differences, draw, load_run, markdown, run_file, summarize
from benchmarks.training.overlapped import MismatchByAge, OverlappedStep
from benchmarks.training.tasks import Addition, Digits, Setup, accuracy, coarse_weights, held_out
from examples import grpo
from examples.as_engine import AsEngine
from rollout_service.client import SyncRolloutClient
from rollout_service.correction import correct, preset
from rollout_service.errors import QuantizationError
from rollout_service.local import LocalService, running_service

PAGE = PROJECT / "docs/tis_ablation.md"
RESULTS = {"digits": "training_tis_ablation", "addition": "training_tis_ablation_addition"}
PARTS = {  # of the page, by task
    "digits": "benchmarks/training/tis_ablation.py",
    "addition": "benchmarks/training/tis_ablation.py --task addition",
}
FIGURES = {"digits": PROJECT / "docs/tis_ablation.png", "addition": PROJECT / "docs/tis_ablation_addition.png"}

ADDITION_MODEL = Path(tempfile.gettempdir()) / "addition-moe"
AHEAD = 4  # batches under way beside the one that is trained on, in the arms about a kept KV cache


def _overlapped(weights: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings with which all batches under way are sampled at once, by unchanging KV scales."""
    return {"weights": weights, "engine": {"max_num_seqs": 1024}, "kv_cache": {"scales_policy": "unit"}}


SERVICES: dict[str, dict[str, dict[str, Any]]] = {  # laid over the deployment's YAML and the task's settings
    "bf16": {"quant": {"weights": "none"}, "kv_cache": {"dtype": "bfloat16", "scales_policy": "unit"}},
    "fp8": {},
    "fp8_linear": {"kv_cache": {"dtype": "bfloat16", "scales_policy": "unit"}},
    "fp8_drop": _overlapped({"kv_cache_on_update": "drop"}),
    **{f"fp8_keep{age}": _overlapped({"kv_cache_on_update": "keep", "kv_max_age": age}) for age in (1, 2, 4)},
}
COARSE_LEVELS = 5
"""Chosen by k3 in a trial with seed 0: 2 with 3 levels, which ruin the model, 0.05 with 5, and 0.02 with 7."""
MEASURED = grpo.TIS
"""Whose metrics are reported for every arm, so that they compare; without TIS, of the weights it would have given."""


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    title: str
    service: str  # a key of ``SERVICES``
    correction: str  # a preset of ``rollout_service.correction``
    coarse_levels: int | None = None
    """None: the service quantizes. Otherwise the trainer pushes coarse codes with so many levels."""
    as_engine: bool = False  # the policy is computed as the engines do, and not in the trainer's own precision
    ahead: int = 0  # batches under way beside the one that is trained on; with more than 0, rollouts run over updates


ARMS = {
    "bf16": Arm("BF16", "bf16", "metrics_only"),
    "fp8_tis": Arm("FP8, TIS", "fp8", "token_tis"),
    "fp8": Arm("FP8", "fp8", "metrics_only"),
    "coarse_tis": Arm(f"FP8, weights of {COARSE_LEVELS} levels, TIS", "fp8", "token_tis", COARSE_LEVELS),
    "coarse": Arm(f"FP8, weights of {COARSE_LEVELS} levels", "fp8", "metrics_only", COARSE_LEVELS),
    "linear": Arm("FP8, BF16 KV cache", "fp8_linear", "metrics_only"),
    "as_engine": Arm("FP8, BF16 KV cache, policy in FP8", "fp8_linear", "metrics_only", as_engine=True),
    "fp8_drop": Arm(f"{AHEAD} batches ahead, KV cache dropped", "fp8_drop", "token_tis", ahead=AHEAD),
    **{
        f"fp8_keep{age}": Arm(
            f"{AHEAD} batches ahead, KV cache kept, age ≤ {age}", f"fp8_keep{age}", "token_tis", ahead=AHEAD
        )
        for age in (1, 2, 4)
    },
}
TITLES = {name: arm.title for name, arm in ARMS.items()}
KV_TITLES = {name: title.rpartition(", KV cache ")[2] for name, title in TITLES.items() if ARMS[name].ahead}
"""Titles in docs/kv_cache.md."""

Say = Callable[[str], None]


class AblationOptions(Options):
    """The runs."""

    task: Literal["digits", "addition"] = "digits"
    """digits: the demo's, on a CPU. addition: long answers by a mixture of experts, on a GPU."""
    steps: int = Field(default=24, ge=1)
    """GRPO steps of a run."""
    seeds: int = Field(default=3, ge=1)
    """Runs of an arm: seeds 0 to N − 1."""
    arms: str = ",".join(name for name, arm in ARMS.items() if not arm.ahead)
    """Which, separated by commas."""
    limit_s: float = Field(default=float("inf"), gt=0)
    """Seconds of a run, after which the steps made so far are its result."""
    out: Path = Path("out/tis_ablation")
    """Folder for runs, table and figure."""
    resume: bool = False
    """Keep the runs in --out that have ended, make the others."""
    report: bool = False
    """Train nothing: only write table and figure of the runs in --out."""
    prepare: bool = False
    """Make the model at --model, and nothing else."""
    model: Path = ADDITION_MODEL
    """The folder of the addition task's model."""
    publish: bool = False
    """Also write docs/ and benchmarks/results/."""

    @property
    def runs(self) -> Path:
        return self.out / "runs"


def parse_arms(text: str) -> list[str]:
    """Return the named arms in the order of ``ARMS``. Raises BadParameter for unknown names and for none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise typer.BadParameter(
            f"--arms {text!r}: {', '.join(unknown) or 'nothing'} is no arm; there are {', '.join(ARMS)}"
        )
    return [name for name in ARMS if name in names]


def setup_of(task: str, out: Path, model: Path) -> Setup:
    """Return the task of that name. Raises BadParameter if its model is missing."""
    if task == "digits":
        return Digits(out / "warm_start", deployment=CPU_DEPLOYMENT)
    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"--model {model}: there is no model; make it with --prepare")
    return Addition(model.absolute())


def settings_of(arm: str, steps: int, setup: Setup) -> dict[str, Any]:
    """Return what a run depends on beside its seed."""
    task = setup.task
    sizes = {name: getattr(task, name) for name in ("prompts", "completions", "max_tokens", "learning_rate")}
    return {"steps": steps, **setup.settings(), **sizes, "temperature": grpo.TEMPERATURE, **asdict(ARMS[arm])}


class Changes:
    """Makes weight versions of a model, and tells how much each differs from the one before."""

    def __init__(self, pushed: Callable[[PreTrainedModel], dict[str, torch.Tensor]]) -> None:
        self._pushed = pushed
        self._before: dict[str, torch.Tensor] = {}
        self.share = 0.0
        """Of the elements of the newest version, those whose bits differ from the version before."""

    def __call__(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Make a version."""
        new = {name: tensor.clone() for name, tensor in self._pushed(model).items()}
        changed = sum(int((tensor != self._before[name]).sum()) for name, tensor in new.items() if self._before)
        self.share = changed / sum(tensor.numel() for tensor in new.values())
        self._before = new
        return new


class Ablation:
    """The runs of one service."""

    def __init__(
        self, service: LocalService, client: SyncRolloutClient, setup: Setup, options: AblationOptions
    ) -> None:
        self._client, self._setup, self._options = client, setup, options
        self._model_path = service.config.model.path
        self._tokenizer = AutoTokenizer.from_pretrained(self._model_path)
        self._task = setup.task
        self._recipe = client.recipe()
        caches = [replica.kv_cache for replica in client.fleet().replicas]
        choices = [cache.choice.model_dump(mode="json") for cache in caches if cache is not None]
        self._origin = {**results.origin(), "machine": results.machine(), "kv_cache": choices}

    def run(self, arm: str, seed: int, say: Say) -> None:
        """Train once, and write each step as it ends."""
        began = time.perf_counter()
        settings = settings_of(arm, self._options.steps, self._setup)
        self._by_age = MismatchByAge()
        run = Run(arm, seed, settings, self._origin)
        model = self._setup.start(self._model_path, seed)
        try:
            self._train(run, model, began, say)
            ended = "all steps were made, or the time was over"
        except QuantizationError as error:  # its weights are NaN: a result
            ended = str(error)
        questions = held_out(self._task, seed)
        run.end.update(
            trainer_accuracy=self._setup.trainer_accuracy(model, self._tokenizer, seed),
            service_accuracy=accuracy(self._task, questions, self._answers_of_service(questions)),
            wall_s=round(time.perf_counter() - began, 1),
            ended=ended,
        )
        if ARMS[arm].ahead:
            run.end["kv_ages"] = self._by_age.rows()
        run.save(self._options.runs)
        say(f"{run.end}")

    def _train(self, run: Run, model: PreTrainedModel, began: float, say: Say) -> None:
        arm, seed = run.arm, run.seed
        levels, in_bf16, quantized = ARMS[arm].coarse_levels, grpo.in_bf16, self._recipe.quantized
        versions = Changes(
            in_bf16 if levels is None else lambda model: coarse_weights(in_bf16(model), quantized, levels)
        )
        chosen = AsEngine(model, self._recipe) if ARMS[arm].as_engine else self._setup.policy(model)
        with chosen as policy:
            ahead = ARMS[arm].ahead
            train = functools.partial(overlapped.train, ahead=ahead) if ahead else grpo.train
            training = train(
                self._client,
                model,
                self._tokenizer,
                self._options.steps,
                seed,
                task=self._task,
                correction=preset(ARMS[arm].correction),
                pushed=versions,
                policy=policy,
            )
            last = time.perf_counter()
            for count, step in enumerate(training, 1):
                now = time.perf_counter()
                measured = {name: float(f"{value:.6g}") for name, value in self._measure(step, now - last).items()}
                measured["changed"] = float(f"{versions.share:.6g}")
                run.add(measured)
                run.save(self._options.runs)
                if isinstance(step, OverlappedStep):
                    self._by_age.add(step)
                say(f"step {count}/{self._options.steps}  {results.brief(measured)}")
                if now - began > self._options.limit_s:
                    say(f"--limit-s is over after {count} steps")
                    return
                last = now

    def _measure(self, step: grpo.Step, step_s: float) -> dict[str, float]:
        batch = step.batch
        metrics = correct(step.logprobs, batch.rollout_logprobs, batch.mask, MEASURED).metrics
        error = (step.logprobs.exp() - batch.rollout_logprobs.exp()).abs()[batch.mask]
        return {
            "reward": batch.mean_reward,
            "k3": metrics["rollout_corr/k3_kl"],
            "probability_error": error.mean().item(),
            "ess": metrics["rollout_corr/rollout_is_eff_sample_size"],
            "clipped": metrics["rollout_corr/rollout_is_ratio_fraction_high"],
            "tokens": batch.mask.sum(1).float().mean().item(),
            "cut_off": batch.cut_off,
            "grad_norm": step.metrics["grad_norm"],
            "suspect": float(bool(self._client.weights(step.version).suspect)),
            "step_s": step_s,
            "rollout_s": step.rollout_s,
            "update_s": step.update_s,
        }

    def _answers_of_service(self, questions: list[str]) -> list[str]:
        version = self._client.fleet().latest_version
        rollouts = self._client.generate_batch(
            questions, n=1, max_tokens=self._task.max_tokens, temperature=0.0, min_weight_version=version
        )
        return [rollout.completions[0].text or "" for rollout in rollouts]


def main(options: AblationOptions) -> None:
    """Train arms × seeds one after the other, then write a table and a figure."""
    raise_at_sigterm()
    disable_progress_bar()
    console, began = Console(soft_wrap=True), time.perf_counter()

    def say(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - began:5.0f} s[/dim]  {text}", highlight=False)

    try:
        if options.prepare:
            prepare(options.model, "moe", target=0.35, limit_s=170.0, size=Size(7, 12))
            return
        if not options.report:
            setup = setup_of(options.task, options.out, options.model)
            todo = missing(options, setup)
            for service in [name for name in SERVICES if name in {ARMS[arm].service for arm, _ in todo}]:
                run_all(service, [each for each in todo if ARMS[each[0]].service == service], options, setup, say)
        report(options, say)
    except KeyboardInterrupt:
        say(f"interrupted, the service is stopped; finished runs are in {options.runs}: --resume goes on")
        raise typer.Exit(130) from None


def missing(options: AblationOptions, setup: Setup) -> list[tuple[str, int]]:
    """Return each (arm, seed) that has not ended on disk. Raises BadParameter if the others may not be kept."""
    todo = []
    for seed, arm in itertools.product(range(options.seeds), parse_arms(options.arms)):
        path = run_file(options.runs, arm, seed)
        if (run := load_run(path)) is None or not run.ended:
            todo.append((arm, seed))
        elif run.settings != settings_of(arm, options.steps, setup):
            raise typer.BadParameter(f"{path} was made with other settings, {run.settings}: take another --out")
        elif not options.resume:
            raise typer.BadParameter(f"{path} has ended already: add --resume to keep it, or take another --out")
    return todo


def run_all(name: str, todo: list[tuple[str, int]], options: AblationOptions, setup: Setup, say: Say) -> None:
    """Start a service and train each (arm, seed) of ``todo``."""
    say(f"starting the service {name} for {len(todo)} runs (about a minute)")
    # a folder of its own: weights.root=auto is the same folder for all arms that run on a host
    folder = Path(tempfile.mkdtemp(prefix="tis-ablation-", dir=SHARED_MEMORY))
    try:
        overrides = laid_over(setup.sections, SERVICES[name], {"weights": {"root": folder}})
        with running_service(setup.deployment, overrides) as service, SyncRolloutClient(service.url) as client:
            raise_at_sigterm()  # again: ray.init puts a handler of its own there, which aborts this process
            ablation = Ablation(service, client, setup, options)
            for arm, seed in todo:
                say(f"{TITLES[arm]}, seed {seed}")
                ablation.run(arm, seed, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(options: AblationOptions, say: Say) -> None:
    """Write table and figure to ``--out``, and with ``--publish`` to where the project keeps them."""
    found = [load_run(run_file(options.runs, arm, seed)) for arm in ARMS for seed in range(options.seeds)]
    known = [run for run in found if run is not None and run.curves and run.settings["task"] == options.task]
    runs = [run for run in known if run.ended]
    if left_out := [f"{run.arm} seed {run.seed}" for run in known if run not in runs]:
        say(f"not ended, left out: {', '.join(left_out)}")
    if not runs:
        raise typer.BadParameter(f"{options.runs}: no run of {options.task} has ended")
    if plain := [run for run in runs if not ARMS[run.arm].ahead]:
        report_correction(plain, options, say)
    if ahead := [run for run in runs if ARMS[run.arm].ahead]:
        report_kv_cache(ahead, options, say)


def report_correction(runs: list[Run], options: AblationOptions, say: Say) -> None:
    """Report the arms of docs/tis_ablation.md."""
    table = markdown(runs, TITLES)
    (options.out / "table.md").write_text(table)
    draw(runs, TITLES, options.out / "tis_ablation.png")
    say(f"written: {options.out / 'table.md'} and {options.out / 'tis_ablation.png'}")
    if options.publish:
        figure = FIGURES[options.task]
        draw(runs, TITLES, figure)
        write_part(
            PAGE, PARTS[options.task], f"{table}\n![reward, k3, tokens and gradient norm by step]({figure.name})\n"
        )
        say(f"written: {keep(RESULTS[options.task], runs)}, {PAGE} and {figure}")


def report_kv_cache(runs: list[Run], options: AblationOptions, say: Say) -> None:
    """Report the arms of docs/kv_cache.md."""
    table = options.out / "kv_cache.md"
    table.write_text(kv_cache_report.markdown({options.task: runs}, KV_TITLES))
    say(f"written: {table}")
    if options.publish:
        result = keep(kv_cache_report.NAMES[options.task], runs)
        kv_cache_report.publish(KV_TITLES)
        say(f"written: {result} and {kv_cache_report.PAGE}")


def keep(name: str, runs: list[Run]) -> Path:
    """Write the runs to the result of that name, of the machine that made them."""
    content = {"summary": summarize(runs), "differences": differences(runs), "runs": [asdict(run) for run in runs]}
    return results.write(name, content, machine_name=runs[0].origin["machine"])


if __name__ == "__main__":
    run_command(main)
