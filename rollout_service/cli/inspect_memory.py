"""Memory of a GPU for a model: weights, staging buffer, and the tokens of an FP8 KV cache."""

import math
from typing import TYPE_CHECKING

from rollout_service.cli.inspect_model import ModelReport, TensorKind
from rollout_service.engine.loading.staging_choice import choose
from rollout_service.protocol.base import Frozen

if TYPE_CHECKING:
    from rich.console import Console

SCRATCH_BYTES = 2_300_000_000
"""Size in bytes of activations, CUDA graphs and CUDA itself. Four engines of docs/performance.md, with 8192 tokens a
step, needed 1.7 to 2.3 GB."""


class StagingFit(Frozen):
    """Memory with one kind of staging buffer."""

    staging: str
    """``engine.staging``."""
    is_auto: bool
    """True if ``auto`` chooses it."""
    cache_bytes: int
    """Size left for the KV cache in bytes; negative: the model does not fit."""
    tokens: int | None
    """Capacity of the KV cache in tokens, 0 if the model does not fit. None: unknown for this model's cache."""
    sequences: int | None
    """Number of sequences of the given length that it holds at once."""


class MemoryReport(Frozen):
    """Memory of one GPU of an engine."""

    gpu_bytes: int
    share: float
    """The engine's share of it: ``engine.gpu_memory_utilization``."""
    weights_bytes: int
    scratch_bytes: int
    kv_bytes_per_token: int | None
    length: int
    """Length of a sequence, prompt and completion, in tokens."""
    fits: tuple[StagingFit, ...]


def inspect_memory(report: ModelReport, gpu_gb: float, share: float, length: int) -> MemoryReport:
    """Compute the memory of one of the GPUs in ``report``, with ``gpu_gb`` · 10⁹ bytes; ``share``: the engine's."""
    gpu_bytes = int(gpu_gb * 1e9)
    weights = sum(_on_one_gpu(kind, report.tensor_parallel_size) for kind in report.kinds)
    left = int(share * gpu_bytes) - weights - SCRATCH_BYTES
    auto = choose(weights, left, host_bytes=weights * report.tensor_parallel_size, ranks=report.tensor_parallel_size)
    return MemoryReport(
        gpu_bytes=gpu_bytes,
        share=share,
        weights_bytes=weights,
        scratch_bytes=SCRATCH_BYTES,
        kv_bytes_per_token=report.kv_bytes_per_token,
        length=length,
        fits=tuple(
            _fit(staging, auto.kind, left - area, report.kv_bytes_per_token, length)
            for staging, area in (("device", weights), ("host", 0))
        ),
    )


def print_memory(report: MemoryReport, console: "Console") -> None:
    """Print a sentence and a table."""
    from rich.table import Table

    console.print(
        f"\nOf a GPU's {report.gpu_bytes / 1e9:g} GB the engine has {report.share:.0%}: "
        f"{_gb(report.weights_bytes)} of weights, about {_gb(report.scratch_bytes)} of scratch memory, and the rest.",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("engine.staging", no_wrap=True)
    for column in ("FP8 KV cache", "tokens", f"sequences of {report.length:,}"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("an update closes engines for")
    closed = {"device": "milliseconds", "host": f"{choose(report.weights_bytes, 0, 0, 1).closed_s:.2f} s and more"}
    for fit in report.fits:
        table.add_row(
            f"{fit.staging}{' (auto)' if fit.is_auto else ''}",
            _gb(fit.cache_bytes) if fit.cache_bytes > 0 else "does not fit",
            _count(fit.tokens),
            _count(fit.sequences),
            closed[fit.staging],
        )
    console.print(table)


def _fit(staging: str, auto: str, cache_bytes: int, per_token: int | None, length: int) -> StagingFit:
    tokens = None if per_token is None else max(0, cache_bytes // per_token)
    return StagingFit(
        staging=staging,
        is_auto=staging == auto,
        cache_bytes=cache_bytes,
        tokens=tokens,
        sequences=None if tokens is None else tokens // length,
    )


def _on_one_gpu(kind: TensorKind, gpus: int) -> int:
    """Return the bytes of these tensors on one GPU: a part of matrices and embeddings, all of the rest."""
    if kind.is_vocabulary or ".experts." in kind.name:  # each GPU has parts of all experts, or whole ones
        return -(-kind.stored_bytes // gpus)
    if kind.shard is None:
        return kind.stored_bytes
    return kind.stored_bytes * math.prod(kind.shard) // math.prod(kind.shape)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _count(number: int | None) -> str:
    return "not known" if number is None else f"{number:,}"
