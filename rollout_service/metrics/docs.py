"""Generate the tables of docs/metrics.md: ``python -m rollout_service.metrics.docs docs/metrics.md``."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rollout_service.metrics.table import METRICS, Metric

_SOURCES = ("process", "service", "vllm", "serve")


def rewritten(text: str) -> str:
    """Return ``text`` of docs/metrics.md with regenerated tables. Raises ValueError if a mark is missing."""
    for source in _SOURCES:
        begin, end = f"<!-- {source}: made by rollout_service/metrics/docs.py -->", f"<!-- end of {source} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"docs/metrics.md must have {begin} and {end} once each")
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        rows = table([metric for metric in METRICS if metric.source == source])
        text = f"{before}{begin}\n{rows}\n{end}{after}"
    return text


def table(metrics: Sequence[Metric]) -> str:
    """Return a Markdown table."""
    rows = [
        f"| `{metric.name}` | {' '.join(f'`{label}`' for label in metric.labels)} "
        f"| {'Histogram. ' if metric.kind == 'histogram' else ''}{metric.description.replace('|', '&#124;')} |"
        for metric in metrics
    ]
    return "\n".join(["| name | labels | meaning |", "|---|---|---|", *rows])


def main() -> None:
    """Rewrite the given file."""
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text()))


if __name__ == "__main__":
    main()
