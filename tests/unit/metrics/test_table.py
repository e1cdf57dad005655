"""Names and labels are Prometheus' conventions, and no label can grow without bound."""

import re

from rollout_service.metrics.table import METRICS, OURS

BOUNDED = {
    "adapter": "engine.adapters.max_live",
    "outcome": "classes in errors.py",
    "finish_reason": "vLLM's, three",
    "reason": "three classes in errors.py",
    "cause": "two",
    "start": "two, and the reasons in sessions/template.py",
    "stage": "of an upload four, of an update three",
    "state": "of replicas, versions or sequences",
    "source": "two",
    "quantile": "four",
    "kv_age": "MAX_AGE in monitor/scoring.py",
    "replica": "live ones",
    "layer": "the model's attention layers",
    "tensor": "three",
    "transport": "sources of protocol/upload.py, parts and delta",
    "version": "on disk, staged, or the newest measured",
}


def test_metrics_follow_the_conventions():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in OURS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert not re.search(r"_(ms|us|kb|mb|gb|percent)$", metric.name.removesuffix("_total")), metric.name
        assert metric.description.endswith(".") and "\n" not in metric.description, metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert metric.source == "process" or metric.kind != "histogram", metric.name


def test_a_process_counts_but_for_three_gauges():
    gauges = {metric.name for metric in OURS if metric.source == "process" and metric.kind == "gauge"}
    assert gauges == {"ray_rollout_queue_sequences", "ray_rollout_sequences", "ray_rollout_kv_usage_ratio"}


def test_labels_are_bounded():
    for metric in OURS:
        assert set(metric.labels) <= BOUNDED.keys(), metric.name
        # Ray keeps a process's labels for ever, and adds the replica by itself
        assert metric.source != "process" or not {"version", "replica"} & set(metric.labels), metric.name
