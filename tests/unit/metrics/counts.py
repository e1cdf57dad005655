"""Where a test's counts go."""

from collections import defaultdict
from collections.abc import Mapping

from rollout_service.metrics.table import Metric


class Counts:
    """Keeps every value by metric name and labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], list[float]] = defaultdict(list)

    def record(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self.values[(metric.name, *labels.values())].append(value)

    def total(self, metric: Metric, *labels: str) -> float:
        return sum(self.values[(metric.name, *labels)])
