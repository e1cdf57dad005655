"""What a GPU can do at most: bytes a second of its memory, and operations a second of its tensor cores, as measured."""

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

    copy_bytes_per_s: float
    """Of a plain copy on the device: bytes read and bytes written."""
    read_bytes_per_s: float
    """Of a sum over a tensor, which reads alone."""
    fp8_flops: float
    """Operations a second of a product of two 8192×8192 matrices in FP8, one scale each, by cuBLAS."""
    bf16_flops: float
    """The same in BF16."""

    @property
    def bytes_per_s(self) -> float:
        """The faster of copying and reading."""
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)


def gpu_limits() -> GpuLimits:
    """Measured now; takes a second, and 5 GB of the GPU's memory meanwhile, so that no engine should run beside it."""
    copied = 2 * _BYTES / copy_seconds(_BYTES, "cuda", _REPEATS)
    numbers = torch.ones(_BYTES // 4, device="cuda")
    read = _BYTES / _median(numbers.sum)
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    limits = GpuLimits(copied, read, _products(*(x.to(torch.float8_e4m3fn) for x in (a, b))), _products(a, b))
    del numbers, a, b
    torch.cuda.empty_cache()
    return limits


def _products(a: torch.Tensor, b: torch.Tensor) -> float:
    one, way = torch.ones(1, device=a.device), ScalingType.TensorWise
    if a.dtype == torch.bfloat16:
        seconds = _median(lambda: a @ b.T)
    else:
        seconds = _median(lambda: scaled_mm(a, b.T, one, way, one, way, use_fast_accum=True))
    return 2 * len(a) * len(b) * a.shape[1] / seconds


def _median(call: Callable[[], object]) -> float:
    return statistics.median(event_seconds(call, _REPEATS, queued=True))
