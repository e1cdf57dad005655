"""The service's state in Prometheus' text format: ``GET /metrics``.

It is computed at each scrape, in a registry of its own: removed versions and dead replicas disappear at the next
scrape, which Ray's metrics cannot guarantee (see process.py).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rollout_service.metrics import table
from rollout_service.metrics.process import stages
from rollout_service.metrics.table import OURS, Metric
from rollout_service.protocol.fleet import EngineLoad, KVCacheStatus, ReplicaState, ReplicaStatus
from rollout_service.protocol.mismatch import KVAgeRow, MismatchRow, NotJudged
from rollout_service.protocol.weights import ServiceState, VersionState, WeightStatus

MEASURED_VERSIONS = 8
"""Number of newest versions with mismatch metrics; ``GET /v1/mismatch`` has all kept ones."""


def exposition(state: ServiceState, mismatch: Iterable[MismatchRow] = (), truncated: Iterable[NotJudged] = ()) -> bytes:
    """Return Prometheus' text format, version 0.0.4. Not all mismatch rows are included, see ``_current``."""
    samples = _Samples()
    _service(samples, state)
    for status in state.fleet.replicas:
        _replica(samples, status, state)
    _adapters(samples, state.fleet.replicas)
    for version in state.versions:
        _version(samples, version, state)
    _mismatch(samples, _current(tuple(mismatch), state.fleet.replicas))
    for row in _current(tuple(truncated), state.fleet.replicas):
        samples.add(table.MISMATCH_TRUNCATED, row.tokens, *_labels(row))
    registry = CollectorRegistry()
    registry.register(samples)
    registry.register(_VllmGauges(state.fleet.replicas))
    return generate_latest(registry)


_Row = TypeVar("_Row", MismatchRow, NotJudged)


class _Samples(Collector):
    """All metric families of the service, with the samples of one scrape."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for metric in OURS:
            if metric.source == "service":
                family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                self._families[metric.name] = family(metric.name, metric.description, labels=metric.labels)

    def collect(self) -> Iterable[Family]:
        """Yield the families; prometheus_client's hook."""
        return self._families.values()

    def add(self, metric: Metric, value: float, *labels: object) -> None:
        self._families[metric.name].add_metric([str(label) for label in labels], value)


def _service(samples: _Samples, state: ServiceState) -> None:
    fleet = state.fleet
    samples.add(table.LATEST_VERSION, fleet.latest_version)
    if fleet.latest_version in state.committed_at:
        samples.add(table.LATEST_COMMITTED, state.committed_at[fleet.latest_version])
    samples.add(table.PAUSED, fleet.paused)
    for name in get_args(ReplicaState):
        samples.add(table.REPLICAS, sum(status.state == name for status in fleet.unpinned), name)
    samples.add(table.REPLICAS_MIN, state.replicas_min)
    samples.add(table.REPLICAS_MAX, state.replicas_max)
    samples.add(table.REPLICA_STARTS, state.replica_starts)
    samples.add(table.REPLICA_FAILURES, state.replica_failures)
    samples.add(table.STAGED_UPLOADS, sum(version.state == "staged" for version in state.versions))
    samples.add(table.LOG_BYTES, state.log_bytes)
    samples.add(table.LOG_FREE_BYTES, state.log_free_bytes)


def _replica(samples: _Samples, status: ReplicaStatus, state: ServiceState) -> None:
    replica = status.replica_id
    for name in get_args(ReplicaState):
        samples.add(table.REPLICA_STATE, status.state == name, replica, name)
    samples.add(table.REPLICA_ERROR, status.error is not None, replica)
    samples.add(table.REPLICA_PAUSED, status.paused, replica)
    samples.add(table.REPLICA_SEQUENCES, status.running, replica)
    samples.add(table.REPLICA_REPORT_AGE, status.age_s, replica)
    if status.update is not None:
        for stage, seconds in stages(status.update).items():
            samples.add(table.REPLICA_UPDATE_SECONDS, seconds, replica, stage)
    if status.kv_cache is not None:
        _kv_cache(samples, replica, status.kv_cache)
    if status.version is None:
        return
    samples.add(table.REPLICA_VERSION, status.version, replica)
    if status.group is None:  # a pinned replica is meant to be behind, and must raise no alert
        samples.add(table.STALENESS_VERSIONS, max(0, state.fleet.latest_version - status.version), replica)
        samples.add(table.STALENESS_SECONDS, _behind_s(status.version, state), replica)
    for version in state.versions:
        if version.version == status.version:
            samples.add(table.REPLICA_UPDATE_BYTES, version.total_bytes, replica)


def _kv_cache(samples: _Samples, replica: str, cache: KVCacheStatus) -> None:
    samples.add(table.KV_CACHE_FP8, cache.choice.dtype == "fp8_e4m3", replica)
    if cache.measured_version is not None:
        samples.add(table.KV_UNFIT, len(cache.unfit), replica)
        for layer, shares in cache.saturated.items():
            for tensor, share in zip("kv", shares, strict=True):
                samples.add(table.KV_SATURATED, math.nan if share is None else share, replica, layer, tensor)


def _adapters(samples: _Samples, replicas: Iterable[ReplicaStatus]) -> None:
    running: dict[tuple[str, int], list[int]] = defaultdict(list)
    for held in (each for status in replicas for each in status.adapters):
        if held.error is None:
            running[held.name, held.version].append(held.running)
    for labels, of_replicas in running.items():
        samples.add(table.ADAPTER_REPLICAS, len(of_replicas), *labels)
        samples.add(table.ADAPTER_ROLLOUTS, sum(of_replicas), *labels)


def _behind_s(version: int, state: ServiceState) -> float:
    newer = [at for other, at in state.committed_at.items() if other > version]
    return max(0.0, state.at - min(newer)) if newer else 0.0


def _version(samples: _Samples, status: WeightStatus, state: ServiceState) -> None:
    version = status.version
    for name in get_args(VersionState):
        samples.add(table.VERSION_STATE, status.state == name, version, name)
    samples.add(table.VERSION_BYTES, status.total_bytes, version)
    if status.state == "staged":
        samples.add(table.STAGED_MISSING, len(status.missing_parts), version)
        samples.add(table.STAGED_FAILED, status.error is not None, version)
    elif version in state.committed_at:
        samples.add(table.VERSION_COMMITTED, state.committed_at[version], version)


def _current(rows: Sequence[_Row], replicas: Sequence[ReplicaStatus]) -> list[_Row]:
    """Return the rows of live replicas and of the newest versions; those of adapters only while a replica holds
    them."""
    newest = sorted({row.version for row in rows})[-MEASURED_VERSIONS:]
    live = {status.replica_id for status in replicas}
    held = {(each.name, each.version) for status in replicas for each in status.adapters}
    return [
        row
        for row in rows
        if row.version in newest
        and row.replica_id in live
        and (row.adapter is None or (row.adapter, row.adapter_version) in held)
    ]


def _labels(row: MismatchRow | NotJudged) -> tuple[object, ...]:
    return row.version, row.replica_id, "" if row.adapter is None else f"{row.adapter}@{row.adapter_version}"


def _mismatch(samples: _Samples, rows: Sequence[MismatchRow]) -> None:
    by_age: dict[int, list[KVAgeRow]] = defaultdict(list)
    for row in rows:
        for of_age in row.kv_ages:
            by_age[of_age.age].append(of_age)
        labels = _labels(row)
        for metric, value in (
            (table.MISMATCH_TOKENS, row.tokens),
            (table.MISMATCH_SEQUENCES, row.sequences),
            (table.MISMATCH_K1, row.k1),
            (table.MISMATCH_K3, row.k3),
            (table.MISMATCH_CHI2, row.chi2_token),
            (table.MISMATCH_ESS, row.ess_ratio),
            (table.MISMATCH_PROB_ERROR, row.prob_error),
            (table.MISMATCH_MAX, row.abs_diff_max),
            (table.MISMATCH_OUTSIDE, row.outside_ratio),
            (table.VERSION_SUSPECT, row.suspect_since is not None),
        ):
            samples.add(metric, value, *labels)
        for quantile, value in row.quantiles.items():
            samples.add(table.MISMATCH_ABS_DIFF, value, *labels, quantile)
        if row.suspect_since is not None:
            samples.add(table.SUSPECT_SINCE, row.suspect_since, *labels)
    for age, found in by_age.items():
        tokens = sum(each.tokens for each in found)
        samples.add(table.MISMATCH_AGE_TOKENS, tokens, age)
        samples.add(table.MISMATCH_AGE_K3, sum(each.k3 * each.tokens for each in found) / tokens, age)
        samples.add(table.MISMATCH_AGE_PROB_ERROR, sum(each.prob_error * each.tokens for each in found) / tokens, age)


class _VllmGauges(Collector):
    """Engines' load under vLLM's own names, for clients that treat the service as one vLLM server.

    prime-rl's concurrency controller reads these (559b447, ``orchestrator/inference_metrics.py``, ``concurrency.py``).
    It adds up the capacity of every ``engine`` label that it has ever seen. Engines are therefore numbered instead of
    named: a replica that replaces a dead one must not look like a further engine. ``vllm:num_preemptions`` is left out:
    each update preempts running sequences, and the controller treats any preemption as overload and admits a quarter
    less. There are no gauges if no engine has reported.
    """

    def __init__(self, replicas: Sequence[ReplicaStatus]) -> None:
        served = sorted((r for r in replicas if r.version is not None), key=lambda r: r.replica_id)
        self._loads = [replica.load for replica in served if replica.load is not None]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the families; prometheus_client's hook."""
        if not self._loads:
            return
        yield self._gauge("num_requests_running", "Sequences in the batch.", lambda load: load.running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", lambda load: load.waiting + load.deferred)
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait for capacity, or are deferred, as in a pause.",
            labels=("engine", "reason"),
        )
        for engine, load in enumerate(self._loads):
            by_reason.add_metric([str(engine), "capacity"], load.waiting)
            by_reason.add_metric([str(engine), "deferred"], load.deferred)
        yield by_reason
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda load: load.kv_cache_usage)
        capacity = GaugeMetricFamily(
            "vllm:cache_config_info", "Tokens that the KV cache holds.", labels=("engine", "kv_cache_size_tokens")
        )
        for engine, load in enumerate(self._loads):
            capacity.add_metric([str(engine), str(load.kv_cache_tokens)], 1)
        yield capacity

    def _gauge(self, name: str, description: str, value: Callable[[EngineLoad], float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", description, labels=("engine",))
        for engine, load in enumerate(self._loads):
            family.add_metric([str(engine)], value(load))
        return family
