"""Keeps and plots two runs of the demo, whose policy computes as the engines do, or as transformers does.

    python -m examples.grpo_digits --no-fp8-kv-cache --fake-quant --out out/demo_fake_quant
    python -m examples.grpo_digits --no-fp8-kv-cache --out out/demo_bf16_kv
    python -m benchmarks.training.demo_fake_quant

The same prompts, model, warm start and FP8 engine, without an FP8 KV cache, which ``fake_quant`` does not imitate.
"""

import json
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import typer
from rich.console import Console

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.paths import PROJECT
from benchmarks.common.results import Json

LABELS = {"plain": "policy in fp32", "fake_quant": "policy under fake_quant"}


def main(
    plain: Annotated[Path, typer.Option(help="Of the run without --fake-quant.", exists=True)] = PROJECT
    / "out/demo_bf16_kv/summary.json",
    fake_quant: Annotated[Path, typer.Option(help="Of the run with it.", exists=True)] = PROJECT
    / "out/demo_fake_quant/summary.json",
    picture: Annotated[Path, typer.Option(help="Where the plot goes.")] = PROJECT / "docs/demo_fake_quant.png",
) -> None:
    """Write benchmarks/results/<machine>/training_demo_fake_quant.json and the plot."""
    runs = {"plain": json.loads(plain.read_text()), "fake_quant": json.loads(fake_quant.read_text())}
    for name, summary in runs.items():
        if summary["fp8_kv_cache"] or summary["fake_quant"] != (name == "fake_quant"):
            raise typer.BadParameter(
                f"--{name.replace('_', '-')}: that run had other options: see the head of this file"
            )
    path = results.write("training_demo_fake_quant", {"runs": runs})
    plot(runs, picture)
    Console(soft_wrap=True).print(f"wrote {path} and {picture}")


def plot(runs: dict[str, Json], picture: Path) -> None:
    """Reward and mismatch over steps, of both runs."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    figure.suptitle("GRPO through an FP8 service with a BF16 KV cache")
    for name, summary in runs.items():
        found = summary["by_step"]
        top.plot(found["step"], found["reward"], label=LABELS[name], linewidth=2)
        bottom.plot(found["step"], found["mismatch_k3"], label=LABELS[name])
    top.set(ylabel="mean reward", ylim=(0, 1))
    # below 1e-12 is rounding of the mean itself, and many steps have exactly 0
    bottom.set(ylabel="mismatch k3, nats a token", xlabel="step", ylim=(0, None))
    bottom.set_yscale("symlog", linthresh=1e-12)
    top.legend(loc="lower right")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    run(main)
