"""The measured limits of a GPU: bytes per second of its memory, and operations per second of its tensor cores."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import ScalingType, scaled_mm

from benchmarks.common.timing import copy_seconds, event_seconds

_BYTES = 2 << 30
_SIZE = 8192
_REPEATS = 20


@dataclass(frozen=True)
class GpuLimits:
    """Medians of one GPU."""

    bytes_per_s: float
    """The faster of a copy, which reads and writes, and a sum, which only reads."""
    fp8_flops: float
    """A product of two 8192×8192 matrices in FP8 with one scale each, by cuBLAS."""
    bf16_flops: float
    """The same product in BF16."""


def gpu_limits() -> GpuLimits:
    """Measure the limits. It takes a second and 5 GB of GPU memory, so no engine should run meanwhile."""
    numbers = torch.ones(_BYTES // 4, device="cuda")
    read = _BYTES / _median(numbers.sum)
    del numbers
    copied = 2 * _BYTES / copy_seconds(_BYTES, "cuda", _REPEATS)
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    limits = GpuLimits(max(copied, read), _flops(*(x.to(torch.float8_e4m3fn) for x in (a, b))), _flops(a, b))
    del a, b
    torch.cuda.empty_cache()
    return limits


def _flops(a: torch.Tensor, b: torch.Tensor) -> float:
    one, way = torch.ones(1, device=a.device), ScalingType.TensorWise
    if a.dtype == torch.bfloat16:
        seconds = _median(lambda: a @ b.T)
    else:
        seconds = _median(lambda: scaled_mm(a, b.T, one, way, one, way, use_fast_accum=True))
    return 2 * len(a) * len(b) * a.shape[1] / seconds


def _median(call: Callable[[], object]) -> float:
    return statistics.median(event_seconds(call, _REPEATS))
