"""Load of an engine, for the autoscaler and for Prometheus."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from rollout_service.compat.vllm_internals import (
    IterationStats,
    RayPrometheusStatLogger,
    SchedulerStats,
    without_inter_token_latencies,
)
from rollout_service.fleet.autoscaling import KV_USAGE, RUNNING, SERVING, VERSION, WAITING
from rollout_service.metrics.process import count_kv_reads
from rollout_service.protocol.fleet import EngineLoad, ReplicaStatus

KV_READS_PERIOD_S = 5.0
"""Seconds between queries of the workers' attention reads, if the backend reads a group's prompt once."""
FRESH_S = 5.0
"""Maximum age of fresh statistics in seconds. vLLM sends them with a step's outputs. After an abort, or while paused,
the last ones stay."""
LONG_PREFILL = 512
"""Minimum number of tokens of a prefill whose speed is measured. Shorter ones take one step, whatever their length."""
QUEUE_FRESH_S = 10.0
"""Maximum age of a gateway's report in seconds. Gateways with calls on a replica report at least every 2 s."""


class SchedulerLog(StatLoggerBase):
    """A vLLM stat logger that keeps the statistics of the last step."""

    def __init__(self) -> None:
        self._stats, self._at = SchedulerStats(), -float("inf")
        self._dropped = 0
        """Number of preemptions by ``drop_cache`` that vLLM has not reported yet."""
        self.preemptions = 0
        """Number of requests that were preempted for want of memory."""
        self.prefill_tokens_per_s = 0.0
        """Moving mean of the speed of long prefills; 0: none has run."""
        self.decode_step_s = 0.0
        """Time in seconds for each token of a completion, without the steps in which others' prompts are computed; 0:
        none has ended."""

    def drop_cache(self) -> None:
        """Note that the KV cache of all running requests was dropped. vLLM reports that as their preemption."""
        self._dropped = self._stats.num_running_reqs

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, *_: Any, **__: Any
    ) -> None:
        """Store the statistics. vLLM calls this after each step."""
        if iteration_stats is not None:
            dropped = min(self._dropped, iteration_stats.num_preempted_reqs)
            self._dropped -= dropped
            self.preemptions += iteration_stats.num_preempted_reqs - dropped
            for request in iteration_stats.finished_requests:
                self._note_prefill(request.num_prompt_tokens - request.num_cached_tokens, request.prefill_time)
                self._note_decode(request.mean_time_per_output_token)
        if scheduler_stats is not None:
            self._stats, self._at = scheduler_stats, time.monotonic()

    def _note_prefill(self, tokens: int, seconds: float) -> None:
        if tokens >= LONG_PREFILL and seconds > 0:
            before, speed = self.prefill_tokens_per_s, tokens / seconds
            self.prefill_tokens_per_s = before + (speed - before) / 8 if before else speed

    def _note_decode(self, step_s: float) -> None:
        if step_s > 0:
            before = self.decode_step_s or step_s
            # prefill of others only makes steps longer, so short ones are nearer to the truth
            self.decode_step_s = before + (step_s - before) / (4 if step_s < before else 64)

    def log_engine_initialized(self) -> None:
        """Do nothing. vLLM calls this at the start."""

    def load(self, admitted: int, kv_cache_tokens: int) -> EngineLoad:
        """Return the engine's load, for reports.

        ``admitted``: sequences that the replica has accepted and not answered. If the last step is old, the engine is
        paused and all of them are deferred.
        """
        stats = self._stats
        if admitted == 0:  # the last step's statistics stay after an abort
            return EngineLoad(running=0, waiting=0, deferred=0, kv_cache_usage=0.0, kv_cache_tokens=kv_cache_tokens)
        is_fresh = time.monotonic() - self._at <= FRESH_S
        return EngineLoad(
            running=stats.num_running_reqs if is_fresh else 0,
            waiting=stats.num_waiting_reqs if is_fresh else 0,
            deferred=stats.num_skipped_waiting_reqs if is_fresh else admitted,
            kv_cache_usage=stats.kv_cache_usage,
            kv_cache_tokens=kv_cache_tokens,
        )


class RayStats(RayPrometheusStatLogger):
    """vLLM's metrics through Ray, without its inter-token latency histogram.

    An observation through Ray takes 4 µs, and vLLM would make one per sequence and step. Its
    ``request_time_per_output_token_seconds`` has the same information per request.
    """

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        *others: Any,
        **named: Any,
    ) -> None:
        """Record the statistics. vLLM calls this after each step."""
        if iteration_stats is not None:
            iteration_stats = without_inter_token_latencies(iteration_stats)
        super().record(scheduler_stats, iteration_stats, *others, **named)


async def watch_kv_reads(
    read: Callable[[], Awaitable[tuple[int, int]]], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Count the KV reads that ``read``, ``EngineAdapter.kv_reads``, returns, one period late, until the engine is
    dead."""
    before: tuple[int, int] | None = None
    try:
        await read()  # the answer is from an unknown time; the next answer is from now
        while True:
            await sleep(KV_READS_PERIOD_S)
            attended, spared = await read()
            if before is not None:  # the first counts come from vLLM's own runs at the engine's start
                count_kv_reads(attended - before[0], spared - before[1])
            before = attended, spared
    except EngineDeadError:  # the health check reports it
        return


class GatewayQueues:
    """The queue lengths that gateways report for this replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the statistics. ``clock``: in seconds."""
        self._clock = clock
        self._queues: dict[str, tuple[int, float]] = {}

    def note(self, origin: str, sequences: int) -> None:
        """Store the report of the gateway ``origin``."""
        self._queues.pop(origin, None)
        if sequences:
            self._queues[origin] = sequences, self._clock()

    def sequences(self) -> int:
        """Return the number of sequences waiting in all gateways. Reports older than ``QUEUE_FRESH_S`` do not count."""
        oldest = self._clock() - QUEUE_FRESH_S
        self._queues = {origin: told for origin, told in self._queues.items() if told[1] >= oldest}
        return sum(sequences for sequences, _ in self._queues.values())


def autoscaling_stats(status: ReplicaStatus, load: EngineLoad, queued: int = 0) -> dict[str, float]:
    """Return the values for ``record_autoscaling_stats``. All are numbers, because Serve stops asking otherwise.

    ``queued``: sequences that wait in the gateways; they count as waiting.
    """
    return {
        RUNNING: float(load.running),
        WAITING: float(load.waiting + load.deferred + queued),
        KV_USAGE: load.kv_cache_usage,
        VERSION: -1.0 if status.version is None else float(status.version),
        SERVING: float(status.state == "ready" and not status.paused and status.error is None),
    }
