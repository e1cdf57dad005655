"""Draws where the seconds of one update went, a bar for each case of ``benchmarks.update.live``.

    python -m benchmarks.update.waterfall [--model qwen3-8b] [--picture docs/update.png]

Medians of a case's pushes, in the order of time: until the trainer's last byte was taken (received, quantized and
stored meanwhile; of ``path`` and ``nccl`` that is not known, and their bars begin with the next); until the version was
committed; until it was staged beside the serving engine and checked; and the time for which the engine was closed.
Cases that were measured with the staging area in host memory, before versions were hashed on the GPU, stand first.
"""

import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.paths import PROJECT
from benchmarks.update.live import RESULT

PHASES = {
    "sent, quantized and stored": "#0072b2",
    "committed": "#e69f00",
    "staged and checked": "#56b4e9",
    "engine closed": "#d55e00",
}
"""In the order of time, in colors of Okabe and Ito: told apart by everyone."""
AIM_S = {"qwen3-8b": 0.5, "qwen3-30b-a3b": 1.5}


class PictureOptions(Options):
    """What is drawn."""

    machine_name: tuple[str, ...] = ("h200", "2x-h200", "2x-h100-80gb-hbm3")
    """Whose results; may be repeated."""
    model: str = "qwen3-8b"
    """Of which."""
    picture: Path = PROJECT / "docs" / "update.png"
    """Where it is put."""


def phases(case: dict[str, Any]) -> dict[str, float]:
    """Seconds of each phase, which add up to the median push."""
    push, after, staged, closed = (
        statistics.median(case[field]) for field in ("push_s", "all_live_s", "stage_s", "closed_s")
    )
    return dict(zip(PHASES, (push - after, max(0.0, after - staged - closed), staged, closed), strict=True))


def label_of(case: dict[str, Any], machine: str) -> str:
    """Two lines. ``machine``: the name of its folder of results."""
    where = {"device": "staged on the GPU", "host": "staged in host memory"}
    staging = where.get(case.get("staging", "auto"), "staged where auto chose")
    gpu = machine.rpartition("x-")[2].partition("-")[0].upper()
    gpus = f"one {gpu}" if case.get("gpus", 1) == 1 else f"{case['gpus']} {gpu}s"
    beside = ", ingest beside the trainer" if case.get("ingest_beside") == "trainer" else ""
    sent = f"{case['sent_gbytes']:.3g} GB, " if case["sent_gbytes"] else ""
    return f"{case['door']}\n{sent}{staging}, {gpus}{beside}"


def draw(cases: list[dict[str, Any]], labels: list[str], picture: Path) -> None:
    """A bar each, the first on top."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.55 * len(cases)), layout="constrained")
    for row, case in enumerate(cases):
        begin = 0.0
        for phase, seconds in phases(case).items():
            axes.barh(row, seconds, left=begin, color=PHASES[phase], height=0.6, label=None if row else phase)
            begin += seconds
        axes.text(begin, row, f" {begin:.2f} s", va="center")
    if (aim := AIM_S.get(cases[0]["model"])) is not None:
        axes.axvline(aim, color="0.45", lw=0.9, ls=":")
        axes.text(aim, -0.75, f"aim {aim:g} s", color="0.35", ha="center", va="bottom")
    axes.set_yticks(range(len(cases)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the trainer's call")
    figure.legend(loc="outside upper center", ncols=len(PHASES), frameon=False)
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def main(options: PictureOptions) -> None:
    """Draw them."""
    found = [
        (case, label_of(case, name))
        for name in options.machine_name
        for case in results.cases(RESULT, machine_name=name)
        if case["model"] == options.model and case["push_s"]
    ]
    if not found:
        raise SystemExit(f"no case of {options.model} in {RESULT}.json of {', '.join(options.machine_name)}")
    found.sort(key=lambda each: each[0].get("staging", "auto") != "auto")
    draw([case for case, _ in found], [label for _, label in found], options.picture)


if __name__ == "__main__":
    run(main)
