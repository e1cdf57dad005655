"""Engines' load under vLLM's own names at ``GET /metrics``, for clients that treat the service as one vLLM server.

prime-rl's concurrency controller reads these (559b447, ``orchestrator/inference_metrics.py``, ``concurrency.py``). It
adds up the capacity of every ``engine`` label that it has ever seen. Engines are therefore numbered instead of named: a
replica that replaces a dead one must not look like a further engine. ``vllm:num_preemptions`` is left out: each update
preempts running sequences, and the controller treats any preemption as overload and admits a quarter less.
"""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rollout_service.protocol.fleet import EngineLoad, ReplicaStatus


class VllmGauges(Collector):
    """The gauges of one scrape. Empty if no engine has reported."""

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
