"""Draws the run of ``benchmarks.autoscaling``: replicas, load and versions over time."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLORS = ("#0072b2", "#e69f00", "#009e73", "#56b4e9")
DRAINING = "#d55e00"
"""Of Okabe and Ito: told apart by everyone."""
NAMES = ("first replica", "second replica", "third replica", "fourth replica")


def draw(run: dict[str, Any], path: Path) -> None:
    """One plot with three panels over the same time."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (replicas, load, versions) = plt.subplots(
        3, 1, sharex=True, figsize=(9, 7), height_ratios=(1, 1.5, 1.3), layout="constrained"
    )
    _replicas(replicas, run)
    _load(load, run)
    _versions(versions, run)
    for axes in (replicas, load, versions):
        for start, end in run["bursts"]:
            axes.axvspan(start, end, color="0.92", zorder=0, lw=0)
        for push in run["pushes"]:
            axes.axvline(push["to_s"], color="0.45", lw=0.8, ls=":", zorder=1)
    versions.set_xlabel("seconds   (grey: a burst of rollouts; dotted: a pushed version is live everywhere)")
    versions.set_xlim(0, run["samples"][-1]["t_s"])
    scaling = run["scaling"]
    figure.suptitle(
        f"{scaling['min_replicas']} → {scaling['max_replicas']} → {scaling['min_replicas']} replicas on "
        f"{run['processor']}: target {scaling['target_sequences']} sequences each, up after "
        f"{scaling['upscale_delay_s']} s, down after {scaling['downscale_delay_s']} s",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _times(run: dict[str, Any]) -> list[float]:
    return [sample["t_s"] for sample in run["samples"]]


def _replicas(axes: Axes, run: dict[str, Any]) -> None:
    times, samples = _times(run), run["samples"]
    axes.step(times, [s["wanted"] for s in samples], where="post", color="0.45", lw=1.6, ls="--", label="target")
    axes.step(times, [s["running"] for s in samples], where="post", color="black", lw=2.2, label="running")
    draining = [s["draining"] for s in samples]
    label = "draining: gets no new rollouts, finishes those it has"
    axes.step(times, draining, where="post", color=DRAINING, lw=1.8, label=label)
    starts = [t for t, s in zip(times, samples, strict=True) if s["wanted"] > s["running"]]
    if starts:
        axes.text((starts[0] + starts[-1]) / 2, 1.5, "an engine\nstarts", ha="center", va="center")
    axes.set_ylabel("replicas")
    axes.set_yticks(range(run["scaling"]["max_replicas"] + 1))
    axes.set_ylim(-0.1, run["scaling"]["max_replicas"] + 0.3)
    axes.legend(loc="lower left", ncols=3, bbox_to_anchor=(0, 1), borderaxespad=0.2, frameon=False)


def _load(axes: Axes, run: dict[str, Any]) -> None:
    times, samples = _times(run), run["samples"]
    ids = _replica_ids(run)
    series = [[s["sequences"].get(replica, 0) for s in samples] for replica in ids]
    axes.stackplot(times, *series, colors=COLORS, labels=NAMES[: len(ids)], alpha=0.75, step="post", lw=0, zorder=2)
    aim = [s["running"] * run["scaling"]["target_sequences"] for s in samples]
    axes.step(times, aim, where="post", color="black", lw=1, label="target × running replicas", zorder=3)
    most = max(*aim, *(sum(values) for values in zip(*series, strict=True)))
    middle = (run["bursts"][-1][1] + times[-1]) / 2
    axes.annotate(
        f"{run['shape']['long']['at_once']} long generations\nare always under way",
        xy=(middle, run["shape"]["long"]["at_once"]),
        xytext=(middle, most * 0.3),
        ha="center",
        arrowprops={"arrowstyle": "->", "lw": 0.8},
    )
    axes.set_ylim(0, most * 1.05)
    axes.set_ylabel("sequences\nrunning and waiting")
    axes.legend(loc="lower left", ncols=3, bbox_to_anchor=(0, 1), borderaxespad=0.2, frameon=False)


def _versions(axes: Axes, run: dict[str, Any]) -> None:
    times, samples = _times(run), run["samples"]
    latest = [s["latest_version"] for s in samples]
    axes.step(times, latest, where="post", color="black", lw=1, ls="--", label="newest committed", zorder=3)
    for number, replica in enumerate(_replica_ids(run)):
        serves = [s["versions"].get(replica) for s in samples]
        # side by side, where they serve the same
        values = [float("nan") if version is None else version - 0.12 * (number + 1) for version in serves]
        axes.step(times, values, where="post", color=COLORS[number % 4], lw=2.2, label=f"{NAMES[number]} serves")
    axes.set_ylabel("weight version")
    axes.set_yticks(range(max(latest) + 1))
    axes.legend(loc="lower right", frameon=False)


def _replica_ids(run: dict[str, Any]) -> list[str]:
    """In order of their coming."""
    return list(dict.fromkeys(replica for sample in run["samples"] for replica in sample["versions"]))
