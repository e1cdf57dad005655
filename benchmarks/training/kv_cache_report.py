"""What a kept KV cache costs: table and figure of the arms of ``tis_ablation`` whose rollouts run over updates."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.common.marked import markdown_table, write_part
from benchmarks.common.paths import PROJECT, RESULTS
from benchmarks.training.ablation_report import CELLS, STYLES, Run, common_steps, draw_curve, summarize

PAGE, FIGURE = PROJECT / "docs/kv_cache.md", PROJECT / "docs/kv_cache.png"
PART = "benchmarks/training/kv_cache_report.py"
NAMES = {"digits": "training_kv_cache", "addition": "training_kv_cache_addition"}
"""Names of the results, by task."""
COLUMNS = ("final reward", "accuracy: service", "seconds a step")
"""Keys of ``CELLS``."""
FEWEST = 1000
"""Tokens without which an age above 0 is left out."""
BY_AGE = {"k3": ("k3, nats per token", 0), "prob_error": ("probability error: exp |log ratio|", 1)}
"""The label of each number that is drawn by age, and its value where nothing differs."""

Tasks = Mapping[str, Sequence[Run]]
"""The runs of each task."""


def kept_runs() -> dict[str, list[Run]]:
    """Return the runs of all kept results."""
    files = {task: file for task, name in NAMES.items() for file in sorted(RESULTS.glob(f"*/{name}.json"))}
    return {task: [Run(**run) for run in json.loads(file.read_text())["runs"]] for task, file in files.items()}


def publish(titles: Mapping[str, str]) -> None:
    """Write the figure of all kept results, and their part of the page."""
    tasks = kept_runs()
    draw(tasks, titles, FIGURE)
    ahead = next(iter(tasks.values()))[0].settings["ahead"]
    note = f"With {ahead} batches ahead no rollout gets older than {ahead} versions: age ≤ {ahead} is unbounded."
    text = f"{markdown(tasks, titles)}\n{note}\n\n![mismatch by age, reward and tokens/s]({FIGURE.name})\n"
    write_part(PAGE, PART, text)


def by_age(runs: Sequence[Run]) -> dict[int, dict[str, float]]:
    """age → tokens, and the means of ``MismatchByAge``, over all runs, of age 0 and of ages with ``FEWEST`` tokens."""
    rows = [row for run in runs for row in run.end["kv_ages"]]
    found: dict[int, dict[str, float]] = {}
    for age in sorted({row["age"] for row in rows}):
        of_age = [row for row in rows if row["age"] == age]
        tokens = sum(row["tokens"] for row in of_age)
        if age and tokens < FEWEST:
            continue
        means = of_age[0].keys() - {"age", "tokens"}
        found[age] = {name: sum(row[name] * row["tokens"] for row in of_age) / tokens for name in means}
        found[age]["tokens"] = tokens
    return found


def markdown(tasks: Tasks, titles: Mapping[str, str]) -> str:
    """Return a table with a line for each arm of each task."""
    oldest = max(age for runs in tasks.values() for age in by_age(runs))
    rows = []
    for task, runs in tasks.items():
        for arm, row in summarize(runs).items():
            ages = by_age([run for run in runs if run.arm == arm])
            ratios = {age: f"{each['k3'] / each['k3_of_age_0']:.2f}" for age, each in ages.items()}
            k3 = [f"{ages[0]['k3']:.2g}", *(ratios.get(age, "") for age in range(1, oldest + 1))]
            speed = f"{row['tokens_per_s']['mean']:.0f}"
            older = 1 - ages[0]["tokens"] / sum(each["tokens"] for each in ages.values())
            rows.append([task, titles[arm], *(CELLS[column](row) for column in COLUMNS), speed, f"{older:.0%}", *k3])
    by_age_heading = ["tokens of age ≥ 1", "k3 of age 0", *(f"{age} ÷ 0" for age in range(1, oldest + 1))]
    heading = ["task", "KV cache", *COLUMNS, "tokens/s", *by_age_heading]
    return markdown_table(heading, rows)


def draw(tasks: Tasks, titles: Mapping[str, str], path: Path) -> None:
    """Draw a column for each task: ``BY_AGE``, reward over steps, and tokens/s."""
    figure, places = plt.subplots(
        4, len(tasks), figsize=(5.5 * len(tasks), 11.5), squeeze=False, layout="constrained", height_ratios=(4, 4, 4, 2)
    )
    for (task, runs), (*ages, reward, speed) in zip(tasks.items(), places.T, strict=True):
        arms = list(dict.fromkeys(run.arm for run in runs))
        machine, seeds = runs[0].origin["machine"], len({run.seed for run in runs})
        ages[0].set_title(f"{task} ({machine}): {common_steps(runs)} steps, seeds: {seeds}", fontsize=11)
        for axes, name in zip(ages, BY_AGE, strict=True):
            _draw_by_age(axes, name, runs, titles)
        for arm in arms:
            draw_curve(reward, [run for run in runs if run.arm == arm], "reward", titles[arm])
        reward.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
        speeds = [row["tokens_per_s"] for row in summarize(runs).values()]
        bars = speed.barh(
            [titles[arm] for arm in arms],
            [each["mean"] for each in speeds],
            xerr=[each["sd"] for each in speeds] if seeds > 1 else None,
            color=[STYLES[arm][0] for arm in arms],
        )
        speed.bar_label(bars, fmt="%.0f", padding=3)
        speed.invert_yaxis()
        speed.set(xlabel="tokens/s of the training loop")
        speed.margins(x=0.15)
    handles = places[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3 * len(tasks), frameon=False, title="KV cache")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_by_age(axes: Axes, name: str, runs: Sequence[Run], titles: Mapping[str, str]) -> None:
    """Draw the mean over all tokens of an arm, and each seed thin."""
    for arm in dict.fromkeys(run.arm for run in runs):
        color, line = STYLES[arm]
        of_arm = [run for run in runs if run.arm == arm]
        for each, width, label in [*(([run], 0.6, None) for run in of_arm), (of_arm, 2.0, titles[arm])]:
            found = by_age(each)
            values = [row[name] for row in found.values()]
            axes.plot(list(found), values, line, color=color, linewidth=width, marker="o", ms=2 * width, label=label)
    ages = by_age(runs)
    fresh = [row[f"{name}_of_age_0"] for row in ages.values()]
    axes.plot(list(ages), fresh, ":", color="grey", label="age 0")
    label, least = BY_AGE[name]
    axes.set(xlabel="age of keys and values, versions", xticks=list(ages), ylabel=label)
    axes.set_ylim(bottom=least)
    axes.ticklabel_format(axis="y", scilimits=(-2, 3), useOffset=False)
    axes.grid(alpha=0.3)
