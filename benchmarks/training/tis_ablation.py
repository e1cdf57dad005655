"""What TIS does for the demo's task: rollouts in BF16, in FP8, and from a quantizer that is coarse on purpose.

And what training through the engine's FP8 does, where its KV cache is BF16 (``examples.as_engine``).

    python -m benchmarks.training.tis_ablation --help

Each arm is the loop of ``examples.grpo`` from the same weights with the same questions; arms differ in the rollout
engine, in the correction and in how the policy is computed. They run one after the other on three services, one in
BF16, one in FP8, and one in FP8 with a BF16 KV cache, whose weight versions go on from run to run. Every run is kept
below ``--out`` as it ends, and ``--resume`` goes on where a stopped ablation was. docs/tis_ablation.md has the results.
"""

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import typer
from pydantic import Field
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import results
from benchmarks.common.command import Options
from benchmarks.common.command import run as run_command
from benchmarks.common.marked import write_part
from benchmarks.common.paths import CPU_DEPLOYMENT, PROJECT
from benchmarks.training.ablation_report import CURVES, Run, differences, draw, load_run, markdown, run_file, summarize
from benchmarks.training.coarse import coarse_weights
from examples import grpo
from examples.as_engine import AsEngine
from examples.digits_task import DIGITS, make_prompts, reward, warm_start
from rollout_service.client import SyncRolloutClient
from rollout_service.correction import correct, preset
from rollout_service.local import LocalService, running_service

PAGE, FIGURE = PROJECT / "docs/tis_ablation.md", PROJECT / "docs/tis_ablation.png"
PART = "benchmarks/training/tis_ablation.py"
"""Of the page: the table."""

SERVICES: dict[str, dict[str, dict[str, Any]]] = {
    "bf16": {"quant": {"weights": "none"}, "kv_cache": {"dtype": "bfloat16", "scales_policy": "unit"}},
    "fp8": {"kv_cache": {"scales_policy": "unit"}},  # as in the published run
    "fp8_linear": {"kv_cache": {"dtype": "bfloat16", "scales_policy": "unit"}},
}
"""Laid over the deployment's YAML."""
COARSE_LEVELS = 5
"""Chosen by k3 in a trial with seed 0: 2 with 3 levels, which ruin the model, 0.05 with 5, and 0.02 with 7."""
HELD_OUT = 256
"""Questions for the accuracy at the end."""
HELD_OUT_SEED = 1_000_000
MEASURED = grpo.TIS
"""Whose metrics are reported for every arm, so that they compare; without TIS, of the weights it would have given."""


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    title: str
    service: Literal["bf16", "fp8", "fp8_linear"]
    correction: str
    """A preset of ``rollout_service.correction``."""
    coarse_levels: int | None = None
    """None: the service quantizes. Otherwise the trainer pushes codes of ``coarse`` with so many levels."""
    as_engine: bool = False
    """The policy is computed as the engines do, and not in fp32."""


ARMS = {
    "bf16": Arm("BF16", "bf16", "metrics_only"),
    "fp8_tis": Arm("FP8, TIS", "fp8", "token_tis"),
    "fp8": Arm("FP8", "fp8", "metrics_only"),
    "coarse_tis": Arm(f"FP8, weights of {COARSE_LEVELS} levels, TIS", "fp8", "token_tis", COARSE_LEVELS),
    "coarse": Arm(f"FP8, weights of {COARSE_LEVELS} levels", "fp8", "metrics_only", COARSE_LEVELS),
    "linear": Arm("FP8, BF16 KV cache", "fp8_linear", "metrics_only"),
    "as_engine": Arm("FP8, BF16 KV cache, policy in FP8", "fp8_linear", "metrics_only", as_engine=True),
}
TITLES = {name: arm.title for name, arm in ARMS.items()}

Say = Callable[[str], None]


class AblationOptions(Options):
    """The runs."""

    steps: int = Field(default=24, ge=1)
    """GRPO steps of a run."""
    seeds: int = Field(default=3, ge=1)
    """Runs of an arm: seeds 0 to N − 1."""
    arms: str = ",".join(ARMS)
    """Which, separated by commas."""
    config: Path = CPU_DEPLOYMENT
    """Deployment to run."""
    out: Path = Path("out/tis_ablation")
    """Folder for runs, table and figure."""
    resume: bool = False
    """Keep the runs that are in --out, make the others."""
    publish: bool = False
    """Also write docs/ and benchmarks/results/."""

    @property
    def runs(self) -> Path:
        """Where runs are kept."""
        return self.out / "runs"


def parse_arms(text: str) -> list[str]:
    """Names separated by commas, in the order of ``ARMS``. Raises ValueError for a name that is none, and for none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise ValueError(f"--arms {text!r}: {', '.join(unknown) or 'nothing'} is no arm; there are {', '.join(ARMS)}")
    return [name for name in ARMS if name in names]


def settings_of(arm: str, steps: int) -> dict[str, Any]:
    """What a run depends on beside its seed."""
    return {
        "steps": steps,
        "prompts_per_step": grpo.PROMPTS_PER_STEP,
        "completions_per_prompt": grpo.COMPLETIONS_PER_PROMPT,
        "learning_rate": grpo.LEARNING_RATE,
        "temperature": grpo.TEMPERATURE,
        **asdict(ARMS[arm]),
    }


def kept_runs(folder: Path, arms: list[str], seeds: int, steps: int) -> dict[tuple[str, int], Run]:
    """(arm, seed) → run, of those that are on disk. Raises ValueError if one was made with other settings."""
    kept = {}
    for arm in arms:
        for seed in range(seeds):
            if (path := run_file(folder, arm, seed)).is_file():
                run = load_run(path)
                if run.settings != settings_of(arm, steps):
                    raise ValueError(f"{path} was made with other settings, {run.settings}: take another --out")
                kept[arm, seed] = run
    return kept


class Ablation:
    """The runs of one service; ``folder`` is where runs and warm starts are kept."""

    def __init__(self, service: LocalService, client: SyncRolloutClient, folder: Path, steps: int) -> None:
        self._client, self._folder, self._steps = client, folder, steps
        self._model_path = service.config.model.path
        self._tokenizer = AutoTokenizer.from_pretrained(self._model_path)
        self._recipe = client.recipe()

    def run(self, arm: str, seed: int, say: Say) -> Run:
        """Train once."""
        model = self._model(seed)
        started = time.perf_counter()
        curves: dict[str, list[float]] = {name: [] for name in CURVES}
        recipe = preset(ARMS[arm].correction)
        computed = AsEngine(model, self._recipe) if ARMS[arm].as_engine else nullcontext()
        with computed as policy:
            training = grpo.train(
                self._client,
                model,
                self._tokenizer,
                self._steps,
                seed,
                correction=recipe,
                pushed=self._pushed(arm),
                policy=policy,
            )
            for step in training:
                for name, value in self._measure(step).items():
                    curves[name].append(float(f"{value:.6g}"))
                if step_is_told(len(curves["reward"]), self._steps):
                    say(f"step {len(curves['reward'])}/{self._steps}  {told(curves)}")
        questions = make_prompts(random.Random(HELD_OUT_SEED + seed), HELD_OUT)
        return Run(
            arm=arm,
            seed=seed,
            settings=settings_of(arm, self._steps),
            curves=curves,
            trainer_accuracy=accuracy(questions, answers_of_trainer(model, self._tokenizer, questions)),
            service_accuracy=accuracy(questions, self._answers_of_service(questions)),
            wall_s=round(time.perf_counter() - started, 1),
        )

    def _model(self, seed: int) -> PreTrainedModel:
        """The weights that every arm of ``seed`` starts from: made once, then read."""
        model = AutoModelForCausalLM.from_pretrained(self._model_path, dtype=torch.float32)
        file = self._folder / "warm_start" / f"seed{seed}.safetensors"
        if file.is_file():
            model.load_state_dict(load_file(file))
            return model
        warm_start(model, self._tokenizer, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".tmp")
        save_file(model.state_dict(), unfinished)
        unfinished.rename(file)
        return model

    def _pushed(self, arm: str) -> Callable[[PreTrainedModel], dict[str, torch.Tensor]]:
        levels = ARMS[arm].coarse_levels
        if levels is None:
            return grpo.in_bf16
        return lambda model: coarse_weights(grpo.in_bf16(model), self._recipe.quantized, levels)

    def _measure(self, step: grpo.Step) -> dict[str, float]:
        metrics = correct(step.logprobs, step.batch.rollout_logprobs, step.batch.mask, MEASURED).metrics
        return {
            "reward": step.batch.mean_reward,
            "k3": metrics["rollout_corr/k3_kl"],
            "ess": metrics["rollout_corr/rollout_is_eff_sample_size"],
            "clipped": metrics["rollout_corr/rollout_is_ratio_fraction_high"],
            "suspect": float(bool(self._client.weights(step.version).suspect)),
        }

    def _answers_of_service(self, questions: list[str]) -> list[str]:
        version = self._client.fleet().latest_version
        rollouts = self._client.generate_batch(
            questions, n=1, max_tokens=grpo.MAX_TOKENS, temperature=0.0, min_weight_version=version
        )
        return [rollout.completions[0].text or "" for rollout in rollouts]


def answers_of_trainer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> list[str]:
    """Greedy answers of the model as it is trained, in fp32 and without an engine."""
    tokens = torch.tensor(tokenizer(questions)["input_ids"])
    with torch.no_grad():
        for _ in range(DIGITS):
            logits = model(tokens, use_cache=False, logits_to_keep=1).logits
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return [text.partition(tokenizer.eos_token)[0] for text in tokenizer.batch_decode(tokens[:, -DIGITS:])]


def accuracy(questions: list[str], answers: list[str]) -> float:
    """Share of the digits that are right, in [0, 1]."""
    return sum(reward(question, answer) for question, answer in zip(questions, answers, strict=True)) / len(questions)


def step_is_told(step: int, steps: int) -> bool:
    """The first, every eighth and the last get a line."""
    return step in (1, steps) or step % 8 == 0


def told(curves: dict[str, list[float]]) -> str:
    """The last step in a line."""
    return f"reward {curves['reward'][-1]:.2f}  k3 {curves['k3'][-1]:.1e}  ESS {curves['ess'][-1]:.3f}"


def main(options: AblationOptions) -> None:
    """Train arms × seeds one after the other, then write a table and a figure (about 40 minutes on 2 cores)."""
    try:
        chosen = parse_arms(options.arms)
        kept = kept_runs(options.runs, chosen, options.seeds, options.steps)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if kept and not options.resume:
        raise typer.BadParameter(
            f"{options.out} has {len(kept)} runs already: add --resume to keep them, or take another --out"
        )
    disable_progress_bar()
    console, began = Console(soft_wrap=True), time.perf_counter()

    def say(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - began:5.0f} s[/dim]  {text}", highlight=False)

    wanted = [(arm, seed) for seed in range(options.seeds) for arm in chosen]
    try:
        for service in SERVICES:
            todo = [each for each in wanted if ARMS[each[0]].service == service and each not in kept]
            if todo:
                kept |= run_all(service, todo, options, say)
    except KeyboardInterrupt:
        say(f"interrupted, the service is stopped; finished runs are in {options.runs}: --resume goes on")
        raise typer.Exit(130) from None
    report([kept[arm, seed] for arm in chosen for seed in range(options.seeds)], options, say)


def run_all(name: str, todo: list[tuple[str, int]], options: AblationOptions, say: Say) -> dict[tuple[str, int], Run]:
    """Start a service, train each (arm, seed) of ``todo``, and keep each run as it ends."""
    done: dict[tuple[str, int], Run] = {}
    say(f"starting the service {name} for {len(todo)} runs (about a minute)")
    overrides = SERVICES[name] | {"weights": {"root": options.out / "weights" / name}}
    with running_service(options.config, overrides) as service, SyncRolloutClient(service.url) as client:
        ablation = Ablation(service, client, options.out, options.steps)
        for arm, seed in todo:
            say(f"{TITLES[arm]}, seed {seed}")
            run = done[arm, seed] = ablation.run(arm, seed, say)
            say(f"accuracy {run.trainer_accuracy:.3f} (service {run.service_accuracy:.3f}) after {run.wall_s:.0f} s")
            run.save(options.runs)
    return done


def report(runs: list[Run], options: AblationOptions, say: Say) -> None:
    """Write table and figure to ``--out``, and with ``--publish`` to where the project keeps them."""
    table = markdown(runs, TITLES)
    (options.out / "table.md").write_text(table)
    draw(runs, TITLES, options.out / "tis_ablation.png")
    say(f"written: {options.out / 'table.md'} and {options.out / 'tis_ablation.png'}")
    if options.publish:
        draw(runs, TITLES, FIGURE)
        write_part(PAGE, PART, table)
        content = {"summary": summarize(runs), "differences": differences(runs), "runs": [asdict(run) for run in runs]}
        say(f"written: {results.write('training_tis_ablation', content)}, {PAGE} and {FIGURE}")


if __name__ == "__main__":
    run_command(main)
