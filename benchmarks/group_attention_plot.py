"""Draws docs/group_attention.png out of the results: what it gains to read a group's prompt once.

    python -m benchmarks.group_attention_plot [--machine-name h200]

Left: the attention alone, over the prompt's length and the size of groups, as ``benchmarks.kernels.group_attention``
measured it; cells that were not measured stay empty. Right: whole engines, by ``benchmarks.group_attention``.
"""

from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from benchmarks.common import results
from benchmarks.common.paths import PROJECT
from benchmarks.common.results import Json

PICTURE = PROJECT / "docs/group_attention.png"
MODEL, KV, OWN_TOKENS = "qwen3-8b", "fp8", 512
"""What the left part shows."""
TOKENS, STEP = "#0072b2", "#e69f00"
"""Of Okabe and Ito: told apart by everyone."""


def grid_of(cases: list[Json]) -> tuple[list[int], list[int], list[list[float]]]:
    """Prompt lengths, group sizes, and the ratio of each pair [groups][prompts]; NaN: not measured."""
    shown = {
        (case["group"], case["prompt_tokens"]): case["ratio"]
        for case in cases
        if (case["model"], case["kv"], case["own_tokens"]) == (MODEL, KV, OWN_TOKENS)
    }
    groups, prompts = (sorted(set(each)) for each in zip(*shown, strict=True))
    return prompts, groups, [[shown.get((group, prompt), float("nan")) for prompt in prompts] for group in groups]


def draw(kernels: list[Json], engines: list[Json], path: Path, machine: str) -> None:
    """Both parts beside each other."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(1, 1.25))
    _grid(left, *grid_of(kernels))
    _bars(right, engines)
    figure.suptitle(f"A group's prompt read once, to FlashAttention 3 on one {machine.upper()}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _grid(axes: Axes, prompts: list[int], groups: list[int], ratios: list[list[float]]) -> None:
    axes.imshow(np.array(ratios), norm=LogNorm(0.5, 10), cmap="PuBu", origin="lower", aspect="auto")
    for y, row in enumerate(ratios):
        for x, ratio in enumerate(row):
            if ratio == ratio:  # not NaN
                axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", color="white" if ratio > 4 else "black")
    axes.set_xticks(range(len(prompts)), map(str, prompts))
    axes.set_yticks(range(len(groups)), map(str, groups))
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("completions of a prompt, of 256 in all")
    axes.set_title(f"attention alone: heads of {MODEL}, FP8, {OWN_TOKENS} own tokens each", fontsize=9)
    axes.spines[:].set_visible(False)


def _bars(axes: Axes, engines: list[Json]) -> None:
    cases = sorted(engines, key=lambda case: case["ratio"])
    places = np.arange(len(cases))
    for shift, kind, color, label in ((0.2, "ratio", TOKENS, "tokens/s"), (-0.2, "step_ratio", STEP, "a step")):
        drawn = axes.barh(places + shift, [case[kind] for case in cases], 0.38, color=color, label=label)
        axes.bar_label(drawn, fmt="%.2f", padding=2)
    axes.axvline(1, color="0.4", lw=0.8, ls=":")
    axes.set_yticks(places, [_name(case) for case in cases])
    axes.set_xlabel("times as fast")
    axes.set_title("whole engines, prefill included: FP8 weights and KV cache", fontsize=9)
    axes.legend(loc="lower right", frameon=False)


def _name(case: Json) -> str:
    system = f"{case['system_tokens']} in common + " if case["system_tokens"] else ""
    return (
        f"{case['model']}\n{case['groups']} × {case['n']} × ({system}{case['prompt_tokens']} + {case['output_tokens']})"
    )


def main(machine_name: Annotated[str, typer.Option(help="Whose results.")] = "h200") -> None:
    """Draw docs/group_attention.png."""
    kernels, engines = (
        results.cases(n, machine_name=machine_name) for n in ("kernels_group_attention", "group_attention")
    )
    draw(kernels, engines, PICTURE, machine_name)
    typer.echo(f"wrote {PICTURE}")


if __name__ == "__main__":
    typer.run(main)
