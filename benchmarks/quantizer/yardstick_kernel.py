"""A plain one-pass Triton quantizer, as one would write it first: what ``benchmarks.quantizer`` measures ours against.

Its division is Triton's approximate one, so a few codes in a million differ from the reference's.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _quantize(x, codes, scales, rows, columns, scale_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = row[:, None] * columns + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.max(tl.abs(values), 1), 0), 1e-12) / 448.0
    tl.store(codes + at, (values / scale).to(tl.float8e4nv), mask=inside)
    tl.store(scales + tl.program_id(0) * scale_stride + tl.program_id(1), scale)


def yardstick(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantize BF16 ``weight`` [N, K] into ``codes`` and ``scales``."""
    _quantize[tuple(scales.shape)](weight, codes, scales, *weight.shape, scales.shape[1], BLOCK=128, num_warps=8)
