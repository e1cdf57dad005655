"""The figure and the tables of a trainer's sides: where a step's seconds go, and reward by step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.common import results
from benchmarks.common.marked import markdown_table, write_part
from benchmarks.common.paths import PROJECT, RESULTS

PAGES = PROJECT / "docs/trainers"
ENGINES = {"trl": "TRL's server", "verl": "verl's engine"}
NAMES = {"trl": "TRL", "verl": "verl"}
COLORS = {"ours": "#d62728", "own": "#1f77b4"}
STAGES = {"sync": "weights, until served", "rollout": "rollouts", "train": "training"}
_SHADES = {"sync": "#d95f02", "rollout": "#1b9e77", "train": "#7570b3"}

Case = dict[str, Any]


def part(trainer: str) -> str:
    """Return the name of the part of a trainer's page that has table and figure."""
    return f"python -m benchmarks.trainers.{trainer} --report"


def title_of(case: Case) -> str:
    return "this service, FP8" if case["side"] == "ours" else f"{ENGINES[case['trainer']]}, BF16"


def write(trainer: str, result: str) -> None:
    """Draw the figure and write the page's part from the kept result. Raises ValueError without one."""
    files = sorted(RESULTS.glob(f"*/{result}.json"))
    if not files:
        raise ValueError(f"there are no results of {NAMES[trainer]}: run --side ours and --side own first")
    machine = files[-1].parent.name
    cases = {case["side"]: case for case in results.cases(result, machine_name=machine)}
    found = [cases[side] for side in COLORS if side in cases]
    page, figure = PAGES / f"{trainer}.md", PAGES / f"{trainer}.png"
    draw(found, figure)
    write_part(
        page, part(trainer), f"{table(found, machine)}\n![reward by step, and seconds of a step]({figure.name})\n"
    )
    print(f"written: {page} and {figure}")


def table(cases: Sequence[Case], machine: str) -> str:
    """Return a table in Markdown, a column for each side."""
    seconds: Callable[[float], str] = "{:.2f}".format
    small: Callable[[float], str] = "{:.1e}".format
    rows: list[tuple[str, Callable[[Case], str]]] = [
        ("a step, seconds", lambda case: seconds(case["median_step_s"])),
        *((f"… {STAGES[name]}", lambda case, name=name: seconds(case[f"median_{name}_s"])) for name in STAGES),
        ("completion tokens/s while sampling", lambda case: f"{case['median_tokens_per_s']:,.0f}"),
        ("k3, engine to trainer", lambda case: small(case["median_k3"])),
        *(
            [("mean difference of a token's logprob", lambda case: small(case["logprob_difference"]))]
            if all("logprob_difference" in case for case in cases)
            else []
        ),
        ("mean difference of a token's probability", lambda case: small(case["median_probability_error"])),
        ("reward, first and last five steps", lambda case: f"{case['first_reward']:.2f} → {case['last_reward']:.2f}"),
        ("steps", lambda case: str(case["steps"])),
        *(
            [("seconds until the server answers", lambda case: f"{case['start']['server_s']:.0f}")]
            if all("server_s" in case["start"] for case in cases)
            else [("seconds until the first step is done", lambda case: f"{case['start']['first_step_s']:.0f}")]
        ),
    ]
    heading = [f"{cases[0]['model']}, {machine}", *map(title_of, cases)]
    return markdown_table(heading, [[title, *map(cell, cases)] for title, cell in rows])


def draw(cases: Sequence[Case], path: Path) -> None:
    """Draw reward by step, and the median seconds of a step, stacked."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", width_ratios=(3, 2))
    for case in cases:
        reward = case["curves"]["reward"]
        left.plot(range(1, len(reward) + 1), reward, color=COLORS[case["side"]], label=title_of(case))
    left.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    left.legend(loc="lower right", frameon=False)
    names, bottom = [title_of(case) for case in cases], [0.0] * len(cases)
    for stage, title in STAGES.items():
        heights = [case[f"median_{stage}_s"] for case in cases]
        right.bar(names, heights, 0.6, bottom, color=_SHADES[stage], label=title)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    right.set(ylabel="seconds of a step (median)")
    right.tick_params(axis="x", labelsize=8)
    right.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8)
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
