"""The main panels as the real Prometheus answered them: docs/dashboards.png."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dashboards.check.answers import Answers, PanelAnswer

K3 = "k3 per version, adapter and replica"
PANELS = (
    ("rollout", "Tokens to clients", "tokens/s"),
    ("rollout", "Time to last token", "s"),
    ("rollout", "Version of each replica", "version"),
    ("mismatch", K3, "nats per token"),
    ("mismatch", "Effective sample size", "share"),
    ("mismatch", "KL against throughput", "nats per token"),
)
LOGARITHMIC = (K3, "KL against throughput")
LEGENDS = 10


def drawn(answers: Answers, path: Path) -> Path:
    """A picture of ``PANELS``, with seconds since the first sample."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 3, figsize=(18, 8), layout="constrained")
    for axes, (dashboard, panel, unit) in zip(grid.flat, PANELS, strict=True):
        found = [each for each in answers.panels if (each.query.dashboard, each.query.panel) == (dashboard, panel)]
        _draw(axes, found)
        axes.set_title(f"{dashboard}: {panel}", fontsize=11)
        axes.set(xlabel="s", ylabel=unit, yscale="log" if panel in LOGARITHMIC else "linear")
    figure.savefig(path, dpi=80)
    return path


def legend(template: str, labels: Mapping[str, str]) -> str:
    """Return a query's legend with the values of a series' labels. Prometheus leaves out labels that are empty."""
    filled = re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), template)
    return " ".join(filled.split())


def _draw(axes: Any, found: list[PanelAnswer]) -> None:
    begin = min((each.samples[0][0] for answer in found for each in answer.series), default=0.0)
    right = None
    for answer in found:
        on = axes
        if answer.query.legend.startswith("tokens "):
            on = right = right or axes.twinx()
            on.set_ylabel("tokens/s, dashed")
        for each in answer.series:
            label = legend(answer.query.legend, each.labels)
            steps = "steps-post" if "ersion" in answer.query.panel else "default"
            style = "--" if on is right else "-"
            times = [at - begin for at, _ in each.samples]
            on.plot(times, [value for _, value in each.samples], style, label=label, drawstyle=steps)
    handles = [pair for each in (axes, right) if each for pair in zip(*each.get_legend_handles_labels(), strict=True)]
    if handles:
        axes.legend(*zip(*handles[:LEGENDS], strict=True), fontsize=7)
