"""Products of FP8 codes on a GPU's tensor cores, accumulated like the engine's kernels.

A Hopper's tensor cores accumulate FP8 products with about 14 bits (DeepSeek-V3's report, arXiv 2412.19437, 3.3.2). BF16
does not always hide this error, so only the same instructions give the engine's results, not even fp32 does. Like
CUTLASS's kernel, this one starts each block of 128 from zero, multiplies its sum by the product of both scales, and
adds it in fp32 with one rounding. vLLM's Triton kernel for experts multiplies with one scale after the other. Results
do not depend on the tile. ``tests/gpu/test_fake_quant.py`` checks for equal bits.
"""

import torch
import triton
import triton.language as tl

from rollout_service.quant.blockwise import BLOCK

_TOKENS = 128
_BLOCK = tl.constexpr(BLOCK)


def scaled_product(
    inputs: torch.Tensor,
    input_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    dtype: torch.dtype,
    scales_in_turn: bool = False,
) -> torch.Tensor:
    """Return ``input @ weightᵀ`` [M, N] in ``dtype``, rounded once from fp32.

    ``inputs``: E4M3 [M, K] with scales fp32 [M, K / 128]; ``weight``: E4M3 [N, K] with scales fp32 [⌈N / 128⌉, K /
    128]; all contiguous, on one GPU that supports FP8. ``scales_in_turn``: multiply with one scale after the other, the
    input's first, like vLLM's kernel for experts. Raises ValueError for shapes that do not match.
    """
    (tokens, columns), rows = inputs.shape, weight.shape[0]
    expected = (tokens, columns // BLOCK), (rows, columns), (-(-rows // BLOCK), columns // BLOCK)
    found = tuple(tuple(tensor.shape) for tensor in (input_scales, weight, weight_scales))
    if columns % BLOCK or found != expected:
        raise ValueError(
            f"input [{tokens}, {columns}] needs K a multiple of {BLOCK}; its scales, the weight and that one's "
            f"scales are {', '.join(map(str, found))} instead of {', '.join(map(str, expected))}"
        )
    output = torch.empty(tokens, rows, dtype=dtype, device=inputs.device)
    if not output.numel():
        return output
    grid = (triton.cdiv(tokens, _TOKENS), triton.cdiv(rows, BLOCK))
    _multiply[grid](
        inputs, input_scales, weight, weight_scales, output, tokens, rows, columns,
        TOKENS=_TOKENS,
        SCALES_IN_TURN=scales_in_turn,
        INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=8,
        num_stages=3,
    )  # fmt: skip
    return output


@triton.jit
def _multiply(
    inputs,
    input_scales,
    weight,
    weight_scales,
    output,
    tokens,
    rows,
    columns,
    TOKENS: tl.constexpr,
    SCALES_IN_TURN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute one tile [TOKENS, 128] of the result; grid: (tiles of tokens, blocks of the weight's rows)."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    column = tl.arange(0, _BLOCK)
    blocks = columns // _BLOCK
    sums = tl.zeros([TOKENS, _BLOCK], tl.float32)
    for block in range(blocks):
        first = block * _BLOCK
        a = tl.load(
            inputs + token[:, None] * columns + first + column[None, :], mask=token[:, None] < tokens, other=0.0
        )
        b = tl.load(weight + row[None, :] * columns + first + column[:, None], mask=row[None, :] < rows, other=0.0)
        a_scale = tl.load(input_scales + token * blocks + block, mask=token < tokens, other=0.0)
        b_scale = tl.load(weight_scales + tl.program_id(1) * blocks + block)
        product = tl.dot(a, b)
        if SCALES_IN_TURN:
            product = product * a_scale[:, None]
            scale = tl.broadcast_to(b_scale, [TOKENS, _BLOCK])
        else:
            scale = tl.broadcast_to((a_scale * b_scale)[:, None], [TOKENS, _BLOCK])
        if INTERPRETED:  # noqa: SIM108 - which has no fused multiply-add
            sums = sums + product * scale
        else:
            sums = tl.fma(product, scale, sums)
    inside = (token[:, None] < tokens) & (row[None, :] < rows)
    tl.store(output + token[:, None] * rows + row[None, :], sums.to(output.dtype.element_ty), mask=inside)
