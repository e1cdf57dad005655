"""Dashboards and alerts name metrics that exist, and every metric is on a dashboard or in the documentation."""

from pathlib import Path

import yaml

from dashboards.check.queries import DASHBOARDS, FOLDER, metrics_of, panel_queries
from rollout_service.metrics.table import METRICS, OURS

PAGE = Path(__file__).parents[3] / "docs/metrics.md"


def on_dashboards() -> set[str]:
    return {name for board in DASHBOARDS for query in panel_queries(board) for name in metrics_of(query.expr)}


def in_alerts() -> set[str]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return {name for rule in group["rules"] for name in metrics_of(rule["expr"])}


def test_every_metric_that_is_named_exists():
    assert (on_dashboards() | in_alerts()) - {metric.name for metric in METRICS} == set()


def test_every_metric_is_on_a_dashboard_or_in_the_documentation():
    page = PAGE.read_text()
    documented = {metric.name for metric in METRICS if f"|`{metric.name}`|" in page}
    assert {metric.name for metric in METRICS} - on_dashboards() - documented == set()


def test_a_query_asks_for_labels_that_its_metric_has():
    labels = {metric.name: set(metric.labels) for metric in OURS if metric.source == "service"}
    for board in DASHBOARDS:
        for query in panel_queries(board):
            for name in metrics_of(query.expr) & labels.keys():
                if f"{name}{{" in query.expr and "replica=~" in query.expr.split(f"{name}{{")[1].split("}")[0]:
                    assert "replica" in labels[name], query
