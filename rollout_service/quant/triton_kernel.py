"""The blockwise quantizer as a Triton kernel: each program reads one 128×128 block once, and writes codes and scale.

Bit for bit ``blockwise.quantize_blockwise``, at the speed of memory:

- The maximum is taken over the BF16 bits as integers: exact, packed two a register, and NaN and infinity win it, so a
  bad weight shows in its block's scale and needs no pass of its own.
- The quotient w/s is IEEE's, but division costs a third of the bandwidth. 1/s is instead split once a block into
  ``high + low``, and ``fma(w, high, w·low)`` rounds the nearly exact product once. w has 8 significant bits and s comes
  from an 8-bit amax, so the few mantissas there are can all be tried: tests/unit/quant/test_split_reciprocal.py does.
- Where the hardware rounds to BF16 and E4M3 (nearest even), its instructions are used. Triton's interpreter on the CPU
  truncates in its casts and has no fused multiply-add: ``INTERPRETED`` rounds in integer arithmetic, and divides.
"""

import triton
import triton.language as tl

_BLOCK = tl.constexpr(128)
_E4M3_MAX = tl.constexpr(448.0)
_AMAX_FLOOR_BITS = tl.constexpr(0x2B8CBCCC)  # fp32 1e-12
_E4M3_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_ROUND_TO_SUBNORMALS = tl.constexpr(1.5 * 2.0**14)  # adding it leaves multiples of 2^-9, the distance of subnormals


@triton.jit
def quantize_blocks(
    table,
    source,
    codes,
    scales,
    rows,
    columns,
    row_stride,
    column_stride,
    DTYPE: tl.constexpr,
    GROUPED: tl.constexpr,
    WHOLE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantize matrices ``[rows, columns]`` of one shape, strides (in elements) and dtype; grid: (blocks, matrices).

    ``GROUPED``: ``table`` int64 [matrices, 3] holds the addresses of each matrix, its codes and its scales; otherwise
    there is one matrix, at ``source``, ``codes``, ``scales``. ``WHOLE``: the caller vouches that rows and columns are
    multiples of 128, columns lie side by side, rows are less than 2^24 elements apart, and addresses and rows start at
    multiples of 16 bytes.
    """
    if GROUPED:
        entry = table + 3 * tl.program_id(1)
        source = tl.load(entry).to(tl.pointer_type(DTYPE))
        codes = tl.load(entry + 1).to(tl.pointer_type(tl.float8e4nv))
        scales = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
        if WHOLE:
            source = tl.multiple_of(source, 16)
            codes = tl.multiple_of(codes, 16)
    block_columns = tl.cdiv(columns, _BLOCK)
    block = tl.program_id(0)
    first_row = (block // block_columns * _BLOCK).to(tl.int64)
    first_column = (block % block_columns * _BLOCK).to(tl.int64)
    row = tl.arange(0, _BLOCK)[:, None]
    column = tl.arange(0, _BLOCK)[None, :]
    if WHOLE:
        weights = tl.load(source + first_row * row_stride + first_column + row * row_stride + column)
    else:
        row = first_row + row
        column = first_column + column
        inside = (row < rows) & (column < columns)
        weights = tl.load(source + row * row_stride + column * column_stride, mask=inside, other=0.0)
    quantized, scale = _quantize(_as_bf16(weights, INTERPRETED), POWER_OF_TWO, INTERPRETED)
    tl.store(scales + block, scale)
    if WHOLE:
        tl.store(codes + first_row * columns + first_column + row * columns + column, quantized)
    else:
        tl.store(codes + row * columns + column, quantized, mask=inside)


@triton.jit
def _quantize(weights, POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr):
    magnitude = weights.to(tl.int16, bitcast=True) & 0x7FFF
    amax_bits = tl.max(tl.max(magnitude, 1), 0).to(tl.int32) << 16
    amax = tl.maximum(amax_bits, _AMAX_FLOOR_BITS).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, _E4M3_MAX)
    if POWER_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    weights = weights.to(tl.float32)
    if INTERPRETED:
        quotient = _round_to_e4m3(tl.div_rn(weights, scale))
    else:
        high, low = _split_reciprocal(scale)
        quotient = tl.fma(weights, high, weights * low)
    return quotient.to(tl.float8e4nv), scale


@triton.jit
def _as_bf16(weights, INTERPRETED: tl.constexpr):
    if INTERPRETED and weights.dtype != tl.bfloat16:
        bits = weights.to(tl.float32).to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(weights != weights, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return weights.to(tl.bfloat16)


@triton.jit
def _split_reciprocal(scale):
    """1/scale = high + low with 0 ≤ low: a negative low would turn the product of a negative zero into +0."""
    nearest = tl.div_rn(1.0, scale)
    bits = nearest.to(tl.int32, bitcast=True)
    below = (bits - 1).to(tl.float32, bitcast=True)
    high = tl.where(tl.fma(-nearest, scale, 1.0) < 0, below, nearest)
    return high, tl.div_rn(tl.fma(-high, scale, 1.0), scale)


@triton.jit
def _round_to_e4m3(quotient):
    """Nearest even at 3 mantissa bits, or at multiples of 2^-9 below the smallest normal; still fp32, sign kept."""
    bits = quotient.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    subnormal = (quotient + _ROUND_TO_SUBNORMALS) - _ROUND_TO_SUBNORMALS
    rounded = tl.where(tl.abs(quotient) < _E4M3_SMALLEST_NORMAL, subnormal, normal)
    sign = bits & -2147483648
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
