"""Metrics that each process counts through Ray, and that the Ray agent of its node exports.

Ray 2.60 drops a gauge that was not set for two of its reporting intervals (20 s), even of live processes. It keeps
counters and histograms of dead processes and old labels until the node's agent ends. Metrics here therefore never have
a version as label. The service itself exports metrics that must be exact or must not vanish: see exposition.py.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from ray.serve import metrics as ray_metrics

from rollout_service import errors
from rollout_service.metrics import table
from rollout_service.metrics.table import Metric
from rollout_service.protocol.fleet import UpdateTimings
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.weights import UploadTimings

logger = logging.getLogger(__name__)
_P = ParamSpec("_P")
_Answer = TypeVar("_Answer")


class RaySink:
    """Ray's metrics, each created at its first use: the replica's context, with its labels, does not exist earlier."""

    def __init__(self) -> None:
        self._made: dict[str, Callable[..., None]] = {}

    def record(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Add to a counter, set a gauge, or observe a value in a histogram. Does nothing outside a Ray cluster."""
        record = self._made.get(metric.name)
        if record is None:
            record = self._made[metric.name] = self._make(metric)
        record(value, tags=dict(labels))

    @staticmethod
    def _make(metric: Metric) -> Callable[..., None]:
        # Ray adds the prefix ray_ to every name and _total to a counter's
        name = metric.name.removeprefix("ray_").removesuffix("_total")
        options = {"name": name, "description": metric.description, "tag_keys": metric.labels}
        made: Callable[..., None] = (
            ray_metrics.Counter(**options).inc if metric.kind == "counter"
            else ray_metrics.Gauge(**options).set if metric.kind == "gauge"
            else ray_metrics.Histogram(**options, boundaries=list(metric.buckets)).observe
        )  # fmt: skip
        return made


sink = RaySink()
"""The sink of this process."""


def record(metric: Metric, value: float = 1.0, **labels: str) -> None:
    """Count, set or observe a value. Raises ValueError for labels that are not the metric's."""
    if tuple(sorted(labels)) != tuple(sorted(metric.labels)) or metric.source != "process":
        raise ValueError(f"cannot record {metric.name} with {labels}: a {metric.source} metric of {metric.labels}")
    if value or metric.kind != "counter":  # Ray refuses to add 0
        sink.record(metric, value, labels)


def outcome_of(error: BaseException) -> str:
    """Return a label for an outcome: ``cancelled``, the class in errors.py, or ``Exception`` for all other errors."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    ours = (cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return next(ours, "Exception")


@contextmanager
def _counted(outcomes: Metric, seconds: Metric) -> Iterator[None]:
    """Count the outcome of a block, and observe its time if it succeeds."""
    started = time.monotonic()
    try:
        yield
    except BaseException as error:
        record(outcomes, outcome=outcome_of(error))
        raise
    record(outcomes, outcome="ok")
    record(seconds, time.monotonic() - started)


def counted_rollout(
    roll_out: Callable[_P, Coroutine[object, None, Rollout]],
) -> Callable[_P, Coroutine[object, None, Rollout]]:
    """Count each call of the gateway's ``roll_out``, and its reply."""

    @functools.wraps(roll_out)
    async def counting(*args: _P.args, **kwargs: _P.kwargs) -> Rollout:
        with _counted(table.REQUESTS, table.TIME_TO_LAST_TOKEN):
            rollout = await roll_out(*args, **kwargs)
        record(table.PROMPT_TOKENS, len(rollout.prompt_token_ids))
        record(table.COMPLETION_TOKENS, sum(len(completion.token_ids) for completion in rollout.completions))
        for completion in rollout.completions:
            record(table.COMPLETIONS, finish_reason=completion.finish_reason)
        record(table.MIXED_COMPLETIONS, sum(len(completion.versions) > 1 for completion in rollout.completions))
        return rollout

    return counting


def counted_commit(
    commit: Callable[_P, Coroutine[object, None, _Answer]],
) -> Callable[_P, Coroutine[object, None, _Answer]]:
    """Count each call of the ingest's ``_commit``."""

    @functools.wraps(commit)
    async def counting(*args: _P.args, **kwargs: _P.kwargs) -> _Answer:
        with _counted(table.COMMITS, table.COMMIT_SECONDS):
            return await commit(*args, **kwargs)

    return counting


def count_update(timings: UpdateTimings, folder: Path) -> None:
    """Count a replica's update to the version in ``folder``."""
    record(table.UPDATES, outcome="ok")
    try:
        record(table.UPDATE_BYTES, sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    except OSError as error:  # if the ingest believes that this replica is dead, it may remove the files
        logger.warning("the bytes of the update from %s are not counted: %s", folder, error)
    for stage, seconds in stages(timings).items():
        record(table.UPDATE_SECONDS, seconds, stage=stage)


def stages(timings: UpdateTimings) -> dict[str, float]:
    """Return label ``stage`` → seconds."""
    return {"stage": timings.stage_s, "closed": timings.closed_s, "load": timings.load_s}


def set_load(running: float, waiting: float, kv_usage: float) -> None:
    """Set the gauges of an engine's load. Must be called at least every 20 s, or Ray drops them."""
    record(table.SEQUENCES, running, state="running")
    record(table.SEQUENCES, waiting, state="waiting")
    record(table.KV_USAGE, kv_usage)


def count_kv_reads(attended: int, spared: int) -> None:
    """Count the KV tokens that decode attended to, and those of them that it did not have to read."""
    record(table.DECODE_KV_TOKENS, attended)
    record(table.DECODE_KV_TOKENS_SPARED, spared)


def counted_conversion(
    convert: Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield from ``convert(tensors)``; count its input bytes, and the time until its last output was consumed."""
    started, nbytes = time.perf_counter(), 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal nbytes
        for name, tensor in tensors:
            nbytes += tensor.nbytes
            yield name, tensor

    yield from convert(counted())
    count_converted(nbytes, time.perf_counter() - started)


def count_converted(nbytes: int, seconds: float) -> None:
    """Count tensors of that many bytes, as received."""
    record(table.QUANTIZE_SECONDS, seconds)
    record(table.QUANTIZE_BYTES, nbytes)


def count_part(nbytes: int) -> None:
    """Count a part that was received and checked."""
    record(table.UPLOAD_PARTS)
    record(table.UPLOAD_BYTES, nbytes)


def count_received(transport: str, nbytes: int, version_bytes: int, timings: UploadTimings) -> None:
    """Count a committed version, received as ``nbytes`` bytes and stored in ``version_bytes`` bytes."""
    record(table.VERSIONS_RECEIVED, transport=transport)
    record(table.RECEIVED_BYTES, nbytes, transport=transport)
    record(table.RECEIVED_VERSION_BYTES, version_bytes, transport=transport)
    for stage in ("receive", "quantize", "store", "finish"):
        record(table.RECEIVED_SECONDS, getattr(timings, f"{stage}_s"), transport=transport, stage=stage)
