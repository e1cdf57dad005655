"""Activations to E4M3 codes with a scale for 128 numbers of a row, in one kernel with what comes before.

Formulas, in fp32 unless marked, with the roundings of vLLM 0.32's fused CUDA kernels of the same names, so that
``quant/engine_roundings.py`` describes these kernels, too:

    rms_norm_per_block_quant         t = x + r;  r' = bf16(t);  n = bf16(t · rsqrt(mean(t²) + ε));  y = bf16(n · w)
    silu_and_mul_per_block_quant     y = (g / (1 + e⁻ᵍ)) · u

    then, for each 128 numbers       s = max(max|y| / 448, 1 / (448 · 512));  code = e4m3(y / s)

Without a residual, t = x and r' is not written. The sum of squares and the exponential may differ in their last bits.

The limit is memory: a token of the norm reads 4·H bytes and writes 3·H (H numbers, BF16, with residual); a token of
SiLU reads 4·I and writes I (I numbers). 256 tokens of Qwen3-8B take 1.7 and 3.6 µs at 4.3 TB/s; vLLM's kernels take 7.3
and 21.
"""

import torch
import triton
import triton.language as tl

from rollout_service.quant.blockwise import BLOCK
from rollout_service.quant.cuda import as_bf16, round_to_e4m3, split_reciprocal

_BLOCK = tl.constexpr(128)
_E4M3_MAX = tl.constexpr(448.0)
_MIN_SCALE = tl.constexpr(1.0 / (448.0 * 512.0))
_STRIDES = ["scale_token_stride", "scale_group_stride"]
"""Arguments that depend on the number of tokens. A kernel for each kind of number would be compiled while serving."""
_SILU_GROUPS = 16
"""Groups of a program of SiLU: 256 tokens of Qwen3-8B then fit on a GPU at once."""


def rms_norm_per_block_quant(
    result: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    epsilon: float,
    scale_ub: torch.Tensor | None,
    residual: torch.Tensor | None,
    group_size: int,
    is_scale_transposed: bool,
) -> None:
    """Normalize, and quantize the result. The arguments are those of vLLM's operator.

    ``result``: E4M3 [tokens, H], contiguous. ``input``, ``residual``: BF16 [tokens, H], columns contiguous;
    ``residual`` is overwritten with the sum. ``weight``: BF16 [H]. ``scale``: fp32 [tokens, H / 128], any strides.
    Raises ValueError for an upper bound of the scales, or other groups than 128 numbers.
    """
    _require_plain(scale_ub, group_size)
    tokens, width = input.shape
    if not tokens:
        return
    groups = triton.next_power_of_2(width // BLOCK)
    added = input if residual is None else residual  # not read without one
    _quantize_norm[(tokens,)](
        result,
        input,
        weight,
        scale,
        added,
        epsilon,
        width,
        input.stride(0),
        added.stride(0),
        *scale.stride(),
        RESIDUAL=residual is not None,
        GROUPS=groups,
        INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=max(1, min(16, groups // 4)),
    )


def silu_and_mul_per_block_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    scale_ub: torch.Tensor | None = None,
    is_scale_transposed: bool = False,
) -> None:
    """Multiply SiLU of the first half with the second half, and quantize. The arguments are those of vLLM's operator.

    ``out``: E4M3 [tokens, I], contiguous. ``input``: BF16 [tokens, 2·I], columns contiguous. ``scales``: fp32
    [tokens, I / 128], any strides. Raises ValueError as ``rms_norm_per_block_quant``.
    """
    _require_plain(scale_ub, group_size)
    tokens, width = out.shape
    if not tokens:
        return
    groups = min(_SILU_GROUPS, triton.next_power_of_2(width // BLOCK))
    _quantize_silu[(tokens, triton.cdiv(width // BLOCK, groups))](
        out,
        input,
        scales,
        width,
        input.stride(0),
        *scales.stride(),
        GROUPS=groups,
        INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=4,
    )


def _require_plain(scale_ub: torch.Tensor | None, group_size: int) -> None:
    if scale_ub is not None or group_size != BLOCK:
        raise ValueError(
            f"quantizing by groups of {group_size}{'' if scale_ub is None else ' with bounded scales'}: these kernels "
            f"have groups of {BLOCK} and no bound; remove the compiler pass of rollout_service.engine.kernels"
        )


@triton.jit(do_not_specialize=_STRIDES)
def _quantize_norm(
    result,
    source,
    weight,
    scale,
    residual,
    epsilon,
    width,
    source_stride,
    residual_stride,
    scale_token_stride,
    scale_group_stride,
    RESIDUAL: tl.constexpr,
    GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid: (tokens,). A program keeps its row in registers, as ``GROUPS`` × 128, a power of two."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = column < width
    total = tl.load(source + token * source_stride + column, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        place = residual + token * residual_stride + column
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, as_bf16(total, INTERPRETED), mask=inside)
    mean = tl.sum(tl.sum(total * total, 1), 0) / width
    normalized = as_bf16(total * tl.rsqrt(mean + epsilon), INTERPRETED).to(tl.float32)
    numbers = as_bf16(normalized * weights, INTERPRETED).to(tl.float32)
    codes, scales = _quantize_groups(numbers, INTERPRETED)
    tl.store(result + token * width + column, codes, mask=inside)
    places = scale + token * scale_token_stride + group.to(tl.int64) * scale_group_stride
    tl.store(places, scales, mask=group * _BLOCK < width)


@triton.jit(do_not_specialize=_STRIDES)
def _quantize_silu(
    out,
    source,
    scales,
    width,
    source_stride,
    scale_token_stride,
    scale_group_stride,
    GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid: (tokens, ⌈width / 128 / GROUPS⌉)."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = column < width
    gate = tl.load(source + token * source_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + token * source_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    numbers = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    codes, scale = _quantize_groups(numbers, INTERPRETED)
    tl.store(out + token * width + column, codes, mask=inside)
    places = scales + token * scale_token_stride + group.to(tl.int64) * scale_group_stride
    tl.store(places, scale, mask=group * _BLOCK < width)


@triton.jit
def _quantize_groups(numbers, INTERPRETED: tl.constexpr):
    """Return E4M3 codes and scales of each row."""
    scales = tl.maximum(tl.div_rn(tl.max(tl.abs(numbers), 1), _E4M3_MAX), _MIN_SCALE)
    divisors = scales[:, None]
    if INTERPRETED:  # Triton's interpreter has no fused multiply-add and truncates in casts
        quotients = round_to_e4m3(tl.div_rn(numbers, tl.broadcast_to(divisors, numbers.shape)))
    else:
        high, low = split_reciprocal(divisors)
        quotients = tl.fma(numbers, tl.broadcast_to(high, numbers.shape), numbers * low)
    return quotients.to(tl.float8e4nv), scales
