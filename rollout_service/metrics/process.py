"""What each process counts, through Ray: its node's agent exports it, whichever node that is.

Ray 2.60 drops a gauge that was not set for two of its reporting intervals (20 s), of live processes too, and keeps
counters and histograms of dead processes and old labels until the node's agent ends. So nothing here has a version as
label, and what must be exact or must not vanish is exported by the service itself: see exposition.py.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import torch
from ray.serve import metrics as ray_metrics

from rollout_service import errors
from rollout_service.metrics import table
from rollout_service.metrics.table import Metric
from rollout_service.protocol.fleet import UpdateTimings
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.weights import UploadTimings

_P = ParamSpec("_P")
_Answer = TypeVar("_Answer")
_RAY = "ray_"
_TOTAL = "_total"


class Sink(Protocol):
    """Where counts go."""

    def record(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Add to a counter, set a gauge, or observe a value in a histogram."""


class RaySink:
    """Ray's metrics, each made at its first use: only then the replica's context, its labels, is there."""

    def __init__(self) -> None:
        self._made: dict[str, Callable[..., None]] = {}

    def record(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """See ``Sink``. Outside a Ray cluster, nothing happens."""
        record = self._made.get(metric.name)
        if record is None:
            record = self._made[metric.name] = self._make(metric)
        record(value, tags=dict(labels))

    @staticmethod
    def _make(metric: Metric) -> Callable[..., None]:
        # Ray puts ray_ before every name and _total behind a counter's
        options = {
            "name": metric.name.removeprefix(_RAY).removesuffix(_TOTAL),
            "description": metric.description,
            "tag_keys": metric.labels,
        }
        made: Callable[..., None]
        if metric.kind == "counter":
            made = ray_metrics.Counter(**options).inc
        elif metric.kind == "gauge":
            made = ray_metrics.Gauge(**options).set
        else:
            made = ray_metrics.Histogram(**options, boundaries=list(metric.buckets)).observe
        return made


sink: Sink = RaySink()
"""Of this process."""


def record(metric: Metric, value: float = 1.0, **labels: str) -> None:
    """Count, set or observe. Raises ValueError for labels that are not the metric's."""
    if tuple(sorted(labels)) != tuple(sorted(metric.labels)) or metric.source != "process":
        raise ValueError(f"{metric.name} is of a {metric.source} and has the labels {metric.labels}, not {labels}")
    if value or metric.kind != "counter":  # Ray refuses to add nothing
        sink.record(metric, value, labels)


def outcome_of(error: BaseException) -> str:
    """A label for how something ended: ``cancelled``, the class in errors.py, or ``Exception`` for everything else."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    ours = (cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return next(ours, "Exception")


@contextmanager
def _outcome(metric: Metric) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        record(metric, outcome=outcome_of(error))
        raise
    record(metric, outcome="ok")


def counted_rollout(
    roll_out: Callable[_P, Coroutine[object, None, Rollout]],
) -> Callable[_P, Coroutine[object, None, Rollout]]:
    """Count each call of the gateway's ``roll_out``, and what it answered."""

    @functools.wraps(roll_out)
    async def counting(*args: _P.args, **kwargs: _P.kwargs) -> Rollout:
        started = time.monotonic()
        with _outcome(table.REQUESTS):
            rollout = await roll_out(*args, **kwargs)
        record(table.TIME_TO_LAST_TOKEN, time.monotonic() - started)
        _count_answer(rollout)
        return rollout

    return counting


def _count_answer(rollout: Rollout) -> None:
    record(table.PROMPT_TOKENS, len(rollout.prompt_token_ids))
    record(table.COMPLETION_TOKENS, sum(len(completion.token_ids) for completion in rollout.completions))
    for completion in rollout.completions:
        record(table.COMPLETIONS, finish_reason=completion.finish_reason)
    record(table.MIXED_COMPLETIONS, sum(len(completion.versions) > 1 for completion in rollout.completions))


def count_update(timings: UpdateTimings, folder: Path) -> None:
    """Count a replica's update to the version in ``folder``."""
    record(table.UPDATES, outcome="ok")
    with suppress(FileNotFoundError):  # an ingest that holds this replica for dead removes what it served
        record(table.UPDATE_BYTES, sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    for stage, seconds in stages(timings).items():
        record(table.UPDATE_SECONDS, seconds, stage=stage)


def stages(timings: UpdateTimings) -> dict[str, float]:
    """Label ``stage`` → seconds."""
    return {"stage": timings.stage_s, "closed": timings.closed_s, "load": timings.load_s}


def set_load(running: float, waiting: float, kv_usage: float) -> None:
    """Show an engine's load. To be called at least every 20 s, or it is not shown."""
    record(table.SEQUENCES, running, state="running")
    record(table.SEQUENCES, waiting, state="waiting")
    record(table.KV_USAGE, kv_usage)


def count_kv_reads(attended: int, spared: int) -> None:
    """Count tokens of KV that decode attended to, and those of them that it did not have to read."""
    record(table.DECODE_KV_TOKENS, attended)
    record(table.DECODE_KV_TOKENS_SPARED, spared)


def counted_conversion(
    convert: Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """``convert(tensors)``; counts the bytes that go in, and the time until the last of what comes out is taken."""
    started, nbytes = time.perf_counter(), 0

    def taken() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal nbytes
        for name, tensor in tensors:
            nbytes += tensor.nbytes
            yield name, tensor

    yield from convert(taken())
    count_converted(nbytes, time.perf_counter() - started)


def count_converted(nbytes: int, seconds: float) -> None:
    """Count tensors of so many bytes, as they came."""
    record(table.QUANTIZE_SECONDS, seconds)
    record(table.QUANTIZE_BYTES, nbytes)


def counted_commit(
    commit: Callable[_P, Coroutine[object, None, _Answer]],
) -> Callable[_P, Coroutine[object, None, _Answer]]:
    """Count each call of the ingest's ``_commit``."""

    @functools.wraps(commit)
    async def counting(*args: _P.args, **kwargs: _P.kwargs) -> _Answer:
        started = time.monotonic()
        with _outcome(table.COMMITS):
            answer = await commit(*args, **kwargs)
        record(table.COMMIT_SECONDS, time.monotonic() - started)
        return answer

    return counting


def count_part(nbytes: int) -> None:
    """Count a part that was received and checked."""
    record(table.UPLOAD_PARTS)
    record(table.UPLOAD_BYTES, nbytes)


def count_received(transport: str, nbytes: int, version_bytes: int, timings: UploadTimings) -> None:
    """Count a version that was committed, which came in ``nbytes`` and is stored in ``version_bytes``."""
    record(table.VERSIONS_RECEIVED, transport=transport)
    record(table.RECEIVED_BYTES, nbytes, transport=transport)
    record(table.RECEIVED_VERSION_BYTES, version_bytes, transport=transport)
    seconds = {"receive": timings.receive_s, "quantize": timings.quantize_s, "store": timings.store_s}
    for stage, spent in (seconds | {"finish": timings.finish_s}).items():
        record(table.RECEIVED_SECONDS, spent, transport=transport, stage=stage)
