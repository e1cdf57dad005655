"""What Prometheus answers to each panel and alert."""

from dataclasses import dataclass, field
from typing import Any

from dashboards.alerts import ALERTS, Alert
from dashboards.check.prometheus import Prometheus, Series
from dashboards.check.queries import DASHBOARDS, PanelQuery, metrics_of, panel_queries, substituted, variables
from rollout_service.metrics import table

RATE_INTERVAL = "30s"
"""Three of Ray's reports: what Grafana makes of $__rate_interval at shorter scrape intervals would be emptier."""
STEP_S = 2.0
ON_GPUS = {table.DECODE_KV_TOKENS.name, table.DECODE_KV_TOKENS_SPARED.name}
"""Metrics of kernels that a CPU engine does not have."""


@dataclass(frozen=True)
class PanelAnswer:
    """Series of one query of a panel."""

    query: PanelQuery
    series: list[Series]

    @property
    def samples(self) -> int:
        return sum(len(each.samples) for each in self.series)

    @property
    def largest(self) -> float:
        return max(value for each in self.series for _, value in each.samples)


@dataclass(frozen=True)
class AlertAnswer:
    """What an alert is about, and whether it would have fired."""

    alert: Alert
    samples: int
    fired: int
    """Samples of its whole expression."""
    health: str
    """By Prometheus, which evaluates the rule file itself."""


@dataclass
class Answers:
    """All of them."""

    panels: list[PanelAnswer] = field(default_factory=list)
    alerts: list[AlertAnswer] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    down: list[str] = field(default_factory=list)
    """Targets that could not be scraped."""

    @property
    def empty(self) -> list[str]:
        """What should have samples on a CPU and has none: queries of panels, alerts, variables."""
        panels = [
            f"{each.query.name}: {each.query.legend}"
            for each in self.panels
            if not each.samples and not metrics_of(each.query.expr) <= ON_GPUS
        ]
        alerts = [each.alert.name for each in self.alerts if not each.samples]
        return panels + alerts + [f"variable {name}" for name, values in self.variables.items() if not values]

    @property
    def good(self) -> bool:
        """Nothing is missing and every rule is healthy."""
        return not self.empty and not self.down and all(each.health == "ok" for each in self.alerts)


def asked(prometheus: Prometheus, begin: float, end: float) -> Answers:
    """Every query over the time from ``begin`` to ``end``, in Unix seconds."""
    answers = Answers(down=prometheus.down())
    for dashboard in DASHBOARDS:
        values = {each.name: "" for each in variables(dashboard)}
        for variable in variables(dashboard):
            found = prometheus.label_values(substituted(variable.selector, values, RATE_INTERVAL), variable.label)
            answers.variables[f"{dashboard}: {variable.name}"] = found
            values[variable.name] = "|".join(found)
        for query in panel_queries(dashboard):
            expr = substituted(query.bare, values, RATE_INTERVAL)
            answers.panels.append(PanelAnswer(query, prometheus.range(expr, begin, end, STEP_S)))
    rules = {rule["name"]: rule for rule in prometheus.rules()}
    answers.alerts += [_alert(prometheus, alert, rules, begin, end) for alert in ALERTS]
    return answers


def _alert(
    prometheus: Prometheus, alert: Alert, rules: dict[str, dict[str, Any]], begin: float, end: float
) -> AlertAnswer:
    def samples(expr: str) -> int:
        return sum(len(each.samples) for each in prometheus.range(expr, begin, end, STEP_S))

    rule = rules.get(alert.name, {"health": "not loaded"})
    return AlertAnswer(alert, samples(alert.value), samples(alert.expr), rule["health"])
