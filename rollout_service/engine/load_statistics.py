"""How busy an engine is: for the autoscaler and for Prometheus."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from rollout_service.compat.vllm_internals import (
    IterationStats,
    RayPrometheusStatLogger,
    SchedulerStats,
    without_inter_token_latencies,
)
from rollout_service.fleet.autoscaling import KV_USAGE, RUNNING, SERVING, VERSION, WAITING
from rollout_service.metrics.process import count_kv_reads, set_load
from rollout_service.protocol.fleet import EngineLoad, ReplicaStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import MultiModalCacheStats

KV_READS_PERIOD_S = 5.0
"""How often workers are asked what attention has read, where it reads a group's prompt once."""
FRESH_S = 5.0
"""vLLM sends its scheduler's numbers with a step's outputs. After an abort, or while paused, the last ones stay."""


QUEUE_FRESH_S = 10.0
"""Gateways with calls on a replica ask it every 2 s at least."""


class SchedulerLog(StatLoggerBase):
    """vLLM's interface for loggers: keeps the numbers of the last step."""

    def __init__(self, vllm_config: "VllmConfig | None" = None, engine_index: int = 0) -> None:
        self._stats, self._at = SchedulerStats(), -float("inf")

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: "MultiModalCacheStats | None" = None,
        engine_idx: int = 0,
    ) -> None:
        """vLLM's hook, after each step."""
        if scheduler_stats is not None:
            self._stats, self._at = scheduler_stats, time.monotonic()

    def log_engine_initialized(self) -> None:
        """vLLM's hook; nothing to say."""

    def load(self, admitted: int) -> dict[str, float]:
        """Sequences running and waiting, and the share of KV blocks in use.

        ``admitted``: sequences that the replica has accepted and not yet answered. They are the truth where the last
        step is old, and where there are none.
        """
        stats = self._stats
        if admitted == 0:
            return {RUNNING: 0.0, WAITING: 0.0, KV_USAGE: 0.0}
        if time.monotonic() - self._at > FRESH_S:
            return {RUNNING: 0.0, WAITING: float(admitted), KV_USAGE: stats.kv_cache_usage}
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        return {RUNNING: float(stats.num_running_reqs), WAITING: float(waiting), KV_USAGE: stats.kv_cache_usage}

    def engine_load(self, admitted: int, kv_cache_tokens: int) -> EngineLoad:
        """The same for reports. Where the last step is old the engine is paused, and what was admitted is deferred."""
        load = self.load(admitted)
        fresh = time.monotonic() - self._at <= FRESH_S
        waiting = self._stats.num_waiting_reqs if fresh and admitted else 0
        return EngineLoad(
            running=int(load[RUNNING]),
            waiting=waiting,
            deferred=int(load[WAITING]) - waiting,
            kv_cache_usage=load[KV_USAGE],
            kv_cache_tokens=kv_cache_tokens,
        )


class RayStats(RayPrometheusStatLogger):
    """vLLM's metrics through Ray, but for its histogram of the time between tokens.

    Ray takes 4 µs for an observation, and that one would be made for each sequence at each step. vLLM's
    ``request_time_per_output_token_seconds`` says the same per request.
    """

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: "MultiModalCacheStats | None" = None,
        engine_idx: int = 0,
    ) -> None:
        """vLLM's hook, after each step."""
        if iteration_stats is not None:
            iteration_stats = without_inter_token_latencies(iteration_stats)
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)


class ReadingEngine(Protocol):
    """What is needed of the engine adapter."""

    async def kv_reads(self) -> tuple[int, int]: ...


async def watch_kv_reads(engine: ReadingEngine, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Count what ``EngineAdapter.kv_reads`` says, a period late, until the engine is dead."""
    before: tuple[int, int] | None = None
    try:
        await engine.kv_reads()  # whose answer is of no time: the next one is of now
        while True:
            await sleep(KV_READS_PERIOD_S)
            attended, spared = await engine.kv_reads()
            if before is not None:  # what was before belongs to vLLM's own runs, of the engine's start
                count_kv_reads(attended - before[0], spared - before[1])
            before = attended, spared
    except EngineDeadError:  # whoever asks for its health hears of it
        return


class GatewayQueues:
    """What the gateways say of their queues, as far as it is this replica's part."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: in seconds."""
        self._clock = clock
        self._queues: dict[str, tuple[int, float]] = {}

    def note(self, origin: str, sequences: int) -> None:
        """Take in what the gateway ``origin`` says."""
        self._queues.pop(origin, None)
        if sequences:
            self._queues[origin] = sequences, self._clock()

    def sequences(self) -> int:
        """The number of sequences that wait in all gateways; of a gateway that has fallen silent, none."""
        oldest = self._clock() - QUEUE_FRESH_S
        self._queues = {origin: told for origin, told in self._queues.items() if told[1] >= oldest}
        return sum(sequences for sequences, _ in self._queues.values())


def autoscaling_stats(status: ReplicaStatus, log: SchedulerLog, queued: int = 0) -> dict[str, float]:
    """Return what ``record_autoscaling_stats`` returns: numbers only, or Serve stops asking.

    ``queued``: sequences that wait in the gateways. They count as waiting.
    """
    serving = status.state == "ready" and not status.paused and status.error is None
    version = -1 if status.version is None else status.version
    load = log.load(status.running)
    load[WAITING] += queued
    return {**load, VERSION: float(version), SERVING: float(serving)}


def show_load(status: ReplicaStatus, log: SchedulerLog) -> None:
    """Export the same for Prometheus; vLLM's own gauges vanish while it idles or is paused."""
    load = log.load(status.running)
    set_load(load[RUNNING], load[WAITING], load[KV_USAGE])
