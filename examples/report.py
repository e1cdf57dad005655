"""How the demo's training went: a progress bar while it runs, then summary.json and report.png."""

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

EDGE_STEPS = 5
"""``reward_last`` is the mean over so many steps; ``reward_first`` is that of step 1, before the first update."""
MOST_AT_FIRST, LEAST_AT_LAST = 0.35, 0.8
"""Outside these the demo has not shown that something was learnt."""


@dataclass(frozen=True)
class StepRecord:
    """One GRPO step."""

    version: int
    """Pushed at the end of the step."""
    reward: float
    """Mean over the step's completions, in [0, 1]."""
    mismatch_k3: float
    """Mean of exp(Δ) − 1 − Δ over tokens, Δ = trainer − rollout logprob."""
    tokens: int
    rollout_s: float
    update_s: float
    """From the first byte pushed until every replica serves the version."""
    step_s: float
    """The whole step."""


class Report:
    """Collects steps and tells about them."""

    def __init__(self, folder: Path, steps: int, *, fake_quant: bool = False) -> None:
        self._folder, self._steps, self._fake_quant = folder, steps, fake_quant
        self.fp8_kv_cache = False
        """Whether the engines' KV caches are in FP8, which the running service says."""
        self._records: list[StepRecord] = []
        self._started = time.perf_counter()
        self._console = Console(soft_wrap=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def say(self, message: str) -> None:
        """One line, with the seconds since the start."""
        self._console.print(f"[dim]{time.perf_counter() - self._started:5.0f} s[/dim]  {message}", highlight=False)

    @contextmanager
    def progress(self) -> Iterator[None]:
        """A bar on a terminal; elsewhere ``record`` prints lines."""
        if not self._console.is_terminal:
            yield
            return
        columns = [TextColumn("GRPO"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")]
        with Progress(*columns, TimeRemainingColumn(), console=self._console) as self._bar:
            self._task = self._bar.add_task("", total=self._steps)
            yield
        self._bar = None

    def record(self, step: StepRecord) -> None:
        """Take in a step and show it."""
        self._records.append(step)
        line = (
            f"reward {step.reward:.2f}  mismatch k3 {step.mismatch_k3:.1e}  "
            f"{step.tokens / step.rollout_s:.0f} tokens/s  update {step.update_s:.2f} s"
        )
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=line)
        elif len(self._records) % EDGE_STEPS == 0 or len(self._records) == 1:
            self.say(f"step {len(self._records)}/{self._steps}  {line}")

    def finish(self) -> int:
        """Write the summary and the plot; returns the exit code: 0 if the model has learnt."""
        summary = self._summary()
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        plot(self._records, self._title, self._folder / "report.png")
        self.say(
            f"reward {summary['reward_first']:.2f} → {summary['reward_last']:.2f} in {summary['steps']} steps, "
            f"{summary['versions']} weight versions, median update {summary['update_s_median']:.2f} s, "
            f"mismatch k3 {summary['k3_mean']:.1e}"
        )
        self.say(f"written: {self._folder / 'summary.json'} and {self._folder / 'report.png'}")
        if summary["reward_first"] > MOST_AT_FIRST or summary["reward_last"] < LEAST_AT_LAST:
            self.say(
                f"[red]nothing was learnt[/red]: the reward should rise from at most {MOST_AT_FIRST} to at least "
                f"{LEAST_AT_LAST}. Try another --seed or more --steps"
            )
            return 1
        return 0

    @property
    def _title(self) -> str:
        fp8 = "FP8 weights, activations and KV cache" if self.fp8_kv_cache else "FP8 weights and activations"
        return f"GRPO through the rollout service: {fp8}" + (", policy computed likewise" if self._fake_quant else "")

    def _summary(self) -> dict[str, Any]:
        records, mean = self._records, statistics.fmean
        tokens = sum(r.tokens for r in records)
        return {
            "reward_first": records[0].reward,
            "reward_last": mean(r.reward for r in records[-EDGE_STEPS:]),
            "steps": len(records),
            "fp8_kv_cache": self.fp8_kv_cache,
            "fake_quant": self._fake_quant,
            "versions": len({r.version for r in records}) + 1,
            "k3_mean": mean(r.mismatch_k3 for r in records),
            "k3_largest": max(r.mismatch_k3 for r in records),
            "tokens": tokens,
            "tokens_per_s": tokens / sum(r.rollout_s for r in records),
            "update_s_median": statistics.median(r.update_s for r in records),
            "wall_s": time.perf_counter() - self._started,
            "by_step": {
                "step": list(range(1, len(records) + 1)),
                "reward": [r.reward for r in records],
                "mismatch_k3": [r.mismatch_k3 for r in records],
            },
        }


def plot(records: list[StepRecord], title: str, path: Path) -> None:
    """Reward, mismatch and update time over steps, one above the other."""
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    steps = range(1, len(records) + 1)
    figure.suptitle(title)
    top.plot(steps, [r.reward for r in records], color="tab:green", linewidth=2)
    top.axhline(LEAST_AT_LAST, color="grey", linestyle=":", linewidth=1)
    top.set(ylabel="mean reward", ylim=(0, 1))
    middle.plot(steps, [r.mismatch_k3 for r in records], color="tab:red")
    scale = "log" if all(r.mismatch_k3 > 0 for r in records) else "linear"  # of a policy computed as the engine's: 0
    middle.set(ylabel="mismatch k3", yscale=scale)
    bottom.plot(steps, [r.update_s for r in records], color="tab:blue")
    bottom.set(ylabel="push → live, s", xlabel="step", ylim=(0, None))
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
