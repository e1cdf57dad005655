"""What ``tis_ablation`` found: its runs on disk, the table, and the figure."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

EDGE_STEPS = 5
"""The final reward is the mean over so many steps at the end."""
CURVES = ("reward", "k3", "ess", "clipped", "suspect")
"""One value per step, see ``Run.curves``."""
PAIRS = (("fp8_tis", "fp8"), ("coarse_tis", "coarse"))
"""Arms that differ by the correction only."""
STYLES = {
    "bf16": ("black", "-"),
    "fp8_tis": ("#0072b2", "-"),
    "fp8": ("#0072b2", "--"),
    "coarse_tis": ("#d55e00", "-"),
    "coarse": ("#d55e00", "--"),
    "linear": ("#009e73", "--"),
    "as_engine": ("#009e73", "-"),
}
"""Colors of Okabe and Ito; dashed: neither TIS nor a policy in the engine's FP8."""


@dataclass(frozen=True)
class Run:
    """One training: an arm with one seed."""

    arm: str
    seed: int
    settings: dict[str, Any]
    """What the run depends on beside its seed; runs are only put together if they agree."""
    curves: dict[str, list[float]]
    """Per step: ``reward``, mean of the sampled completions in [0, 1]; ``k3``, nats per token; ``ess``, effective
    sample size of the weights that TIS gives or would have given, in (0, 1]; ``clipped``, share of the tokens whose
    ratio is above TIS's cap; ``suspect``, 1 if the service called the version suspect."""
    trainer_accuracy: float
    """After the last step: share of right digits in the trainer's own greedy answers to held-out questions."""
    service_accuracy: float
    """Likewise, of what the service then serves."""
    wall_s: float

    def save(self, folder: Path) -> Path:
        """Write it as JSON; whole or not at all."""
        path = run_file(folder, self.arm, self.seed)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return unfinished.rename(path)


def run_file(folder: Path, arm: str, seed: int) -> Path:
    """Where a run is kept."""
    return folder / f"{arm}_seed{seed}.json"


def load_run(path: Path) -> Run:
    """What ``Run.save`` wrote."""
    return Run(**json.loads(path.read_text()))


def columns(run: Run) -> dict[str, float]:
    """The numbers of one run that the table is about."""
    curves = run.curves
    return {
        "final_reward": statistics.fmean(curves["reward"][-EDGE_STEPS:]),
        "reward_area": statistics.fmean(curves["reward"]),
        "trainer_accuracy": run.trainer_accuracy,
        "service_accuracy": run.service_accuracy,
        "k3": statistics.fmean(curves["k3"]),
        "ess": statistics.fmean(curves["ess"]),
        "clipped": statistics.fmean(curves["clipped"]),
        "suspect": statistics.fmean(curves["suspect"]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation (n − 1; 0 for one value)."""
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else 0.0}


def summarize(runs: Iterable[Run]) -> dict[str, dict[str, dict[str, float]]]:
    """arm → column → mean and sd over seeds, arms in the order of their first run."""
    by_arm: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(columns(run))
    return {arm: {name: spread([row[name] for row in rows]) for name in rows[0]} for arm, rows in by_arm.items()}


def differences(runs: Iterable[Run]) -> dict[str, dict[str, list[float]]]:
    """pair → column → with TIS minus without, one value for each seed that both arms have."""
    found = {(run.arm, run.seed): columns(run) for run in runs}
    seeds = sorted({seed for _, seed in found})
    result: dict[str, dict[str, list[float]]] = {}
    for with_tis, without in PAIRS:
        both = [(found[with_tis, s], found[without, s]) for s in seeds if {(with_tis, s), (without, s)} <= found.keys()]
        if both:
            names = ("final_reward", "reward_area", "trainer_accuracy", "service_accuracy")
            result[f"{with_tis} − {without}"] = {name: [a[name] - b[name] for a, b in both] for name in names}
    return result


def bands(runs: Iterable[Run], curve: str) -> tuple[list[float], list[float], list[float]]:
    """Mean, lowest and highest over runs at each step of ``curve``. Raises ValueError if their lengths differ."""
    steps = list(zip(*(run.curves[curve] for run in runs), strict=True))
    return [statistics.fmean(s) for s in steps], [min(s) for s in steps], [max(s) for s in steps]


def markdown(runs: Sequence[Run], titles: dict[str, str]) -> str:
    """Two tables: all arms, and the differences that TIS makes."""
    percent: Callable[[float], str] = "{:.2%}".format
    lines = [
        "| rollouts | final reward | mean reward of all steps | accuracy: trainer | accuracy: service | k3 | ESS | "
        "clipped | suspect versions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, summary in summarize(runs).items():
        cells = [_plus_minus(summary[name]) for name in ("final_reward", "reward_area")]
        cells += [_plus_minus(summary[name]) for name in ("trainer_accuracy", "service_accuracy")]
        cells += [f"{summary['k3']['mean']:.2g} ± {summary['k3']['sd']:.1g}", f"{summary['ess']['mean']:.4f}"]
        cells += [percent(summary["clipped"]["mean"]), f"{summary['suspect']['mean']:.0%}"]
        lines.append(f"| {titles[arm]} | {' | '.join(cells)} |")
    if gains := differences(runs):
        lines += ["", "| with TIS minus without, per seed | final reward | mean reward | accuracy: trainer | service |"]
        lines.append("|---|---|---|---|---|")
    for pair, gain in gains.items():
        cells = [", ".join(f"{value:+.3f}" for value in values) for values in gain.values()]
        lines.append(f"| {titles[pair.rpartition(' ')[2]]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _plus_minus(value: dict[str, float]) -> str:
    return f"{value['mean']:.3f} ± {value['sd']:.3f}"


def draw(runs: Sequence[Run], titles: dict[str, str], path: Path) -> None:
    """Reward and k3 over steps: mean over seeds, the band from the lowest to the highest."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 8), sharex=True, layout="constrained")
    for arm in summarize(runs):
        color, line = STYLES[arm]
        for axes, curve in ((top, "reward"), (bottom, "k3")):
            mean, low, high = bands((run for run in runs if run.arm == arm), curve)
            steps = range(1, len(mean) + 1)
            axes.plot(steps, mean, color=color, linestyle=line, linewidth=1.8, label=titles[arm])
            axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    seeds = len({run.seed for run in runs})
    top.set(ylabel="mean reward of what was sampled", ylim=(0, 1))
    bottom.set(ylabel="mismatch k3, nats per token", yscale="log", xlabel="step")
    top.legend(loc="lower right", frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.suptitle(f"GRPO on the digits task: mean of {seeds} seeds, band from lowest to highest", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
