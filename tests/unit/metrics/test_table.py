"""Names, units and labels are Prometheus' conventions, and no label can grow without bound."""

import re

import pytest

from rollout_service.metrics.table import METRICS, OURS, Metric

BOUNDED = {
    "outcome": "classes in errors.py",
    "finish_reason": "vLLM's, three",
    "reason": "three classes in errors.py",
    "cause": "two",
    "start": "two, and the reasons in sessions/template.py",
    "stage": "of an upload four, of an update three",
    "state": "of replicas, versions or sequences",
    "source": "two",
    "quantile": "four",
    "replica": "live ones",
    "layer": "the model's attention layers",
    "tensor": "three",
    "transport": "sources of protocol/upload.py, parts and delta",
    "version": "on disk, staged, or the newest measured",
}
of_name = pytest.mark.parametrize("metric", OURS, ids=lambda metric: metric.name)


def test_each_name_is_declared_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


@of_name
def test_names_are_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    unit = metric.name.removesuffix("_total")
    if metric.unit in ("seconds", "bytes"):
        assert unit.endswith(f"_{metric.unit}")
    assert not re.search(r"_(ms|us|kb|mb|gb|percent)$", unit)


@of_name
def test_labels_are_bounded(metric: Metric) -> None:
    assert set(metric.labels) <= BOUNDED.keys()


@of_name
def test_what_ray_keeps_for_ever_has_neither_version_nor_replica(metric: Metric) -> None:
    # Ray adds the replica by itself
    if metric.source == "process":
        assert {"version", "replica"} & set(metric.labels) == set()


@of_name
def test_where_a_metric_is_exported_shows_in_its_name(metric: Metric) -> None:
    prefix = {"process": "ray_rollout_", "service": "rollout_"}[metric.source]
    assert metric.name.startswith(prefix)


@of_name
def test_histograms_have_growing_buckets_and_others_none(metric: Metric) -> None:
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert bool(metric.buckets) == (metric.kind == "histogram")


@of_name
def test_each_says_what_it_means(metric: Metric) -> None:
    assert metric.description.endswith(".") and "\n" not in metric.description
