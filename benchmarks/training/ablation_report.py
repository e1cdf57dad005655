"""What ``tis_ablation`` found: its runs on disk, the table, and the figure."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.common.marked import markdown_table

EDGE_STEPS = 5
"""The final reward is the mean over so many steps at the end."""
PAIRS = (
    ("fp8_tis", "bf16"),
    ("fp8", "bf16"),
    ("fp8_tis", "fp8"),
    ("coarse_tis", "coarse"),
    ("fp8_keep1", "fp8_drop"),
    ("fp8_keep2", "fp8_drop"),
    ("fp8_keep4", "fp8_drop"),
)
"""Arms whose difference is reported, by seed."""
COMPARED = ("final_reward", "reward", "trainer_accuracy", "service_accuracy")
STYLES = {
    "bf16": ("black", "-"),
    "fp8_tis": ("#0072b2", "-"),
    "fp8": ("#d55e00", "--"),
    "coarse_tis": ("#e69f00", "-"),
    "coarse": ("#e69f00", "--"),
    "linear": ("#009e73", "--"),
    "as_engine": ("#009e73", "-"),
    "fp8_drop": ("black", "--"),
    "fp8_keep1": ("#56b4e9", "-"),
    "fp8_keep2": ("#0072b2", "-"),
    "fp8_keep4": ("#d55e00", "-"),
}
"""Colors of Okabe and Ito; dashed: neither TIS nor a policy in the engine's FP8."""
PANELS = {
    "reward": ("mean reward of what was sampled", "linear"),
    "k3": ("mismatch k3, nats per token", "log"),
    "tokens": ("tokens of a completion", "linear"),
    "grad_norm": ("gradient norm", "log"),
}
Summary = dict[str, dict[str, float]]
"""Column → mean and sd over seeds."""
CELLS: dict[str, Callable[[Summary], str]] = {
    "final reward": lambda row: _plus_minus(row["final_reward"]),
    "mean reward": lambda row: _plus_minus(row["reward"]),
    "accuracy: trainer": lambda row: _plus_minus(row["trainer_accuracy"]),
    "accuracy: service": lambda row: _plus_minus(row["service_accuracy"]),
    "k3": lambda row: f"{row['k3']['mean']:.2g}" + (f" ± {row['k3']['sd']:.1g}" if row["k3"]["sd"] else ""),
    "probability error": lambda row: f"{row['probability_error']['mean']:.1e}",
    "ESS": lambda row: f"{row['ess']['mean']:.4f}",
    "clipped": lambda row: f"{row['clipped']['mean']:.3%}",
    "tokens": lambda row: f"{row['tokens']['mean']:.0f}",
    "cut off": lambda row: f"{row['cut_off']['mean']:.1%}",
    "gradient norm, largest": lambda row: f"{row['grad_norm']['mean']:.2g}, {row['max_grad_norm']['mean']:.2g}",
    "suspect versions": lambda row: f"{row['suspect']['mean']:.0%}",
    "seconds a step": lambda row: f"{row['step_s']['mean']:.2f}",
}
"""The cells of an arm's line, by their heading."""


@dataclass(frozen=True)
class Run:
    """One training: an arm with one seed."""

    arm: str
    seed: int
    settings: dict[str, Any]
    """What the run depends on beside its seed; a run is resumed only if they agree."""
    origin: dict[str, Any]
    """Machine, versions, command, and the engine's choice of a KV cache."""
    curves: dict[str, list[float]] = field(default_factory=dict)
    """Per step: ``reward``, mean of the sampled completions in [0, 1]; ``k3``, nats per token; ``probability_error``,
    mean |π_trainer − π_rollout| of tokens; ``ess``, effective sample size of the weights that TIS gives or would have
    given, in (0, 1]; ``clipped``, share of the tokens whose ratio is above TIS's cap; ``tokens`` of a completion;
    ``cut_off``, share of completions that are too long; ``grad_norm``; ``suspect``, 1 if the service called the version
    suspect; seconds of the step, its rollouts and its update."""
    end: dict[str, Any] = field(default_factory=dict)
    """After the last step: ``trainer_accuracy`` and ``service_accuracy`` on held-out questions, ``wall_s``, and why the
    run ``ended``; empty if it did not. ``kv_ages``, rows of ``MismatchByAge``, if batches were sampled ahead."""

    @property
    def ended(self) -> bool:
        """Return True if the run came to its end."""
        return bool(self.end)

    @property
    def steps(self) -> int:
        """The number of steps made."""
        return len(self.curves.get("reward", ()))

    def add(self, step: Mapping[str, float]) -> None:
        """Add the numbers of a step."""
        for name, value in step.items():
            self.curves.setdefault(name, []).append(value)

    def save(self, folder: Path) -> None:
        """Write what is known of the run, in place of what is there of the same arm and seed."""
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / "unfinished"
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(run_file(folder, self.arm, self.seed))


def run_file(folder: Path, arm: str, seed: int) -> Path:
    """Where a run is kept."""
    return folder / f"{arm}_seed{seed}.json"


def load_run(path: Path) -> Run | None:
    """Return what is there of a run; None if it has not begun."""
    return Run(**json.loads(path.read_text())) if path.is_file() else None


def columns(run: Run, steps: int) -> dict[str, float]:
    """Return the numbers of one run that the table is about, up to step ``steps``."""
    curves = {name: values[:steps] for name, values in run.curves.items()}
    found = {"steps": float(run.steps), "final_reward": statistics.fmean(curves["reward"][-EDGE_STEPS:])}
    found |= {name: statistics.fmean(values) for name, values in curves.items()}
    found["max_grad_norm"] = max(curves["grad_norm"])
    found["tokens_per_s"] = run.settings["prompts"] * run.settings["completions"] * found["tokens"] / found["step_s"]
    return found | {name: run.end.get(name, float("nan")) for name in ("trainer_accuracy", "service_accuracy")}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation (n − 1; 0 for one value)."""
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else 0.0}


def common_steps(runs: Iterable[Run]) -> int:
    """Return the number of steps that all runs have made."""
    return min(run.steps for run in runs)


def summarize(runs: Sequence[Run]) -> dict[str, Summary]:
    """arm → column → mean and sd over seeds, arms in the order of their first run; over the steps that all have."""
    by_arm: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(columns(run, common_steps(runs)))
    return {arm: {name: spread([row[name] for row in rows]) for name in rows[0]} for arm, rows in by_arm.items()}


def differences(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """ "one − other" of ``PAIRS`` → column → the difference, one value for each seed that both arms have."""
    found = {(run.arm, run.seed): columns(run, common_steps(runs)) for run in runs}
    seeds = sorted({seed for _, seed in found})
    result: dict[str, dict[str, list[float]]] = {}
    for one, other in PAIRS:
        both = [(found[one, s], found[other, s]) for s in seeds if {(one, s), (other, s)} <= found.keys()]
        if both:
            result[f"{one} − {other}"] = {name: [a[name] - b[name] for a, b in both] for name in COMPARED}
    return result


def mean_curve(runs: Iterable[Run], curve: str) -> list[float]:
    """Return the mean over runs at each step that all of them have."""
    return [statistics.fmean(step) for step in zip(*(run.curves[curve] for run in runs), strict=False)]


def markdown(runs: Sequence[Run], titles: dict[str, str]) -> str:
    """All arms over the steps that all runs have, and, of several seeds, their differences."""
    rows = [[titles[arm], *(cell(row) for cell in CELLS.values())] for arm, row in summarize(runs).items()]
    final, *others = CELLS
    tables = markdown_table(["rollouts", f"{final} of {common_steps(runs)} steps", *others], rows)
    rows = []
    for pair, by_column in differences(runs).items():
        one, _, other = pair.partition(" − ")
        values = [", ".join(f"{value:+.3f}" for value in each) for each in by_column.values()]
        rows.append([f"{titles[one]} − {titles[other]}", *values])
    heading = ("difference, per seed", "final reward", "mean reward", "accuracy: trainer", "service")
    if len({run.seed for run in runs}) > 1:
        tables += f"\n{markdown_table(heading, rows)}"
    return tables


def _plus_minus(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f}" + (f" ± {value['sd']:.3f}" if value["sd"] else "")


def draw_curve(axes: Axes, runs: Sequence[Run], curve: str, title: str) -> None:
    """Draw a curve of one arm over steps: the mean, and each seed thin."""
    color, line = STYLES[runs[0].arm]
    mean = mean_curve(runs, curve)
    axes.plot(range(1, len(mean) + 1), mean, color=color, linestyle=line, linewidth=2, label=title)
    for run in runs:
        axes.plot(range(1, run.steps + 1), run.curves[curve], color=color, linewidth=0.6, alpha=0.5)
    axes.grid(alpha=0.3)


def draw(runs: Sequence[Run], titles: dict[str, str], path: Path) -> None:
    """Draw ``PANELS`` over steps: the mean over an arm's seeds, and each seed thin."""
    figure, places = plt.subplots(2, 2, figsize=(12, 8), sharex=True, layout="constrained")
    for axes, (curve, (label, scale)) in zip(places.flat, PANELS.items(), strict=True):
        for arm in dict.fromkeys(run.arm for run in runs):
            draw_curve(axes, [run for run in runs if run.arm == arm], curve, titles[arm])
        axes.set(ylabel=label, yscale=scale)
    places[0, 0].set(ylim=(0, 1))
    places[0, 0].legend(loc="lower right", frameon=False)
    for axes in places[1]:
        axes.set(xlabel="step")
    task, seeds = runs[0].settings["task"], len({run.seed for run in runs})
    figure.suptitle(f"GRPO on the {task} task: mean of {seeds} seeds, each seed thin", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
