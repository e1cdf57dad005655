"""The quantizer on a GPU: a Triton kernel, launched once for all matrices of equal shape, strides and dtype.

For blockwise FP8 each program reads one 128×128 block once, and writes codes and scale. For channels it reads some
whole rows twice, the second time from the cache. Results are equal, bit for bit, to ``blockwise.quantize_blockwise``
and ``formats.quantize_channelwise``, at memory speed:

- The maximum is taken over the BF16 bits as integers: exact, and packed two a register. NaN and infinity are the
  largest, so a bad weight shows in its block's scale without a separate check.
- The quotient w/s is IEEE's, but division costs a third of the bandwidth. Instead, 1/s is split once per block into
  ``high + low``, and ``fma(w, high, w·low)`` rounds the nearly exact product once. w has 8 significant bits and s comes
  from an 8-bit amax, so tests/unit/quant/test_split_reciprocal.py can try all mantissas.
- Where the hardware rounds to BF16 and E4M3 (nearest even), its instructions are used. Triton's interpreter on the CPU
  truncates in its casts and has no fused multiply-add. With ``INTERPRETED``, the kernel rounds in integer arithmetic,
  and divides.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from rollout_service.gpu.streams import queued_to
from rollout_service.quant.blockwise import BLOCK
from rollout_service.quant.formats import FP8_BLOCK, WeightFormat

LAUNCH_OPTIONS = {"num_warps": 8, "maxnreg": 80}
"""Three blocks then fit a multiprocessor's registers (H200), so that reading one overlaps with writing another. By
default the compiler uses 128 registers a thread, and two blocks fit: 5 to 8% slower."""
MAX_MATRICES = 65535
"""Maximum number of matrices in a launch: the extent of CUDA's grid in its second dimension."""

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
ALIGNED_BYTES = 16
"""Alignment in bytes of codes and weights with which the kernel is fastest."""
_MAX_WHOLE_STRIDE = 1 << 24
_ROWS, _COLUMNS = 4, 2048
"""Number of rows and columns that a program of ``quantize_rows`` holds at once."""

_BLOCK = tl.constexpr(128)
_E4M3_MAX = tl.constexpr(448.0)
_INT8_MAX = tl.constexpr(127.0)
_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)  # the last bit of a sum with it is worth 1
_TO_INTEGER_BITS = tl.constexpr(0x4B400000)
_AMAX_FLOOR_BITS = tl.constexpr(0x2B8CBCCC)  # fp32 1e-12
_E4M3_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_ROUND_TO_SUBNORMALS = tl.constexpr(1.5 * 2.0**14)  # adding it leaves multiples of 2^-9, the distance of subnormals


_Matrix: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Weight, codes and scales."""
_TABLE_ROWS = 2
"""Number of table rows, of 24 bytes, to which each launch's part is padded: Triton compiles a kernel again for a table
that does not begin at a multiple of 16 bytes."""


class Layout(NamedTuple):
    """Common properties of the matrices of one launch."""

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    dtype: torch.dtype
    whole: bool
    """True for full blocks of contiguous, aligned rows: the kernel then needs no masks."""


@dataclass(frozen=True)
class _Launch:
    layout: Layout
    matrices: int
    is_grouped: bool
    """True if a table has the matrices' addresses."""
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """The kernel's first four arguments: the table, or weight, codes and scales of a single matrix. Unused arguments
    are filled with any of these, since the kernel needs a tensor."""


class GroupedQuantization:
    """Quantizes fixed storage repeatedly: prepare once, and call ``run`` for each version.

    ``weights``: [N, K] or [E, N, K], BF16, FP16 or FP32, of any strides. ``codes``, of ``form.dtype``, and ``scales``,
    fp32, of the same leading dimensions, contiguous, are written. The only allocation is a table of addresses, 24 bytes
    a matrix. NaN and infinity become scales that are not finite: check those before using the codes.

    Raises ValueError for tensors that do not match, or are not on one device.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        codes: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        *,
        power_of_two: bool = False,
        form: WeightFormat = FP8_BLOCK,
    ) -> None:
        self._power_of_two, self._form = power_of_two, form
        self._kept = (tuple(weights), tuple(codes), tuple(scales))  # the table holds bare addresses
        groups = defaultdict[Layout, list[_Matrix]](list)
        for each in zip(weights, codes, scales, strict=True):
            _require_fit(*each, form)
            for matrix in [each] if each[0].dim() == 2 else zip(*(stacked.unbind() for stacked in each), strict=True):
                if matrix[2].numel():
                    weight, address = matrix[0], matrix[1].data_ptr()
                    layout = layout_of(weight.shape, weight.stride(), weight.dtype, weight.data_ptr(), address)
                    groups[layout].append(matrix)
        self._launches = _prepare(
            [
                (layout, group[start : start + MAX_MATRICES])
                for layout, group in groups.items()
                for start in range(0, len(group), MAX_MATRICES)
            ]
        )

    @classmethod
    def at(
        cls,
        groups: Sequence[tuple["Layout", npt.NDArray[np.int64]]],
        device: torch.device,
        *,
        power_of_two: bool = False,
        form: WeightFormat = FP8_BLOCK,
    ) -> Self:
        """Create one from addresses. The caller ensures that the matrices meet the constructor's conditions, and stay
        in place.

        ``groups``: each of at most ``MAX_MATRICES`` with a common layout, int64 [matrices, 3]: addresses of weight,
        codes and scales.
        """
        made = cls.__new__(cls)
        made._power_of_two, made._form = power_of_two, form
        padded = [np.concatenate([rows, np.zeros((-len(rows) % _TABLE_ROWS, 3), np.int64)]) for _, rows in groups]
        made._launches, start = [], 0
        if groups:
            table = queued_to(device, torch.from_numpy(np.concatenate(padded)))
        for (layout, rows), taken in zip(groups, map(len, padded), strict=True):
            part = table[start : start + len(rows)]
            made._launches.append(_Launch(layout, len(rows), True, (part, part, part, part)))
            start += taken
        return made

    @property
    def launches(self) -> int:
        """Return the number of kernel launches of one ``run``."""
        return len(self._launches)

    def run(self) -> None:
        """Queue the kernels on the current stream."""
        for launch in self._launches:
            _run(launch, self._form, self._power_of_two)


def _require_fit(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, form: WeightFormat) -> None:
    if weight.dtype not in _DTYPES or weight.dim() not in (2, 3):
        raise ValueError(
            f"a {weight.dtype} tensor of {weight.dim()} dimensions: give BF16, FP16 or FP32 of 2 (or 3, stacked)"
        )
    expected = form.scale_shape(weight.shape)
    if codes.shape != weight.shape or scales.shape != expected:
        raise ValueError(
            f"weight {list(weight.shape)} needs codes of its shape and scales {list(expected)}, but was given "
            f"{list(codes.shape)} and {list(scales.shape)}"
        )
    if codes.dtype != form.dtype or scales.dtype != torch.float32:
        raise ValueError(f"codes must be {form.codes} and scales float32, not {codes.dtype} and {scales.dtype}")
    if not (codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError("codes and scales must be contiguous")
    if not weight.device == codes.device == scales.device:
        raise ValueError(f"weight, codes and scales lie on {weight.device}, {codes.device} and {scales.device}")


def layout_of(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, address: int, codes: int) -> Layout:
    """Return the layout of a matrix [N, K], with strides in elements, and its codes, at these addresses.

    Addresses only matter modulo 16.
    """
    rows, columns = shape
    row_stride, column_stride = strides
    aligned = (address, row_stride * dtype.itemsize, codes)
    whole = (
        rows % BLOCK == columns % BLOCK == 0
        and column_stride == 1
        and 0 <= row_stride < _MAX_WHOLE_STRIDE
        and all(each % ALIGNED_BYTES == 0 for each in aligned)
    )
    return Layout(rows, columns, row_stride, column_stride, dtype, whole)


def _prepare(groups: Sequence[tuple[Layout, list[_Matrix]]]) -> list[_Launch]:
    """Prepare the launches, with one table for all of them, since each table would be a copy to the device."""
    rows: list[tuple[int, int, int]] = []
    starts: list[int] = []
    for _, group in groups:
        starts.append(len(rows))
        if len(group) > 1:
            rows += [(weight.data_ptr(), codes.data_ptr(), scales.data_ptr()) for weight, codes, scales in group]
            rows += [(0, 0, 0)] * (-len(rows) % _TABLE_ROWS)  # keeps the alignment of each launch's part
    table = None
    if rows:
        table = queued_to(groups[0][1][0][0].device, torch.from_numpy(np.array(rows, np.int64)))
    launches = []
    for (layout, group), start in zip(groups, starts, strict=True):
        if len(group) == 1 or table is None:
            weight, codes, scales = group[0]
            launches.append(_Launch(layout, 1, False, (scales, weight, codes, scales)))
        else:
            part = table[start : start + len(group)]
            launches.append(_Launch(layout, len(group), True, (part, part, part, part)))
    return launches


def _run(launch: _Launch, form: WeightFormat, power_of_two: bool) -> None:
    layout = launch.layout
    matrices = (*launch.arguments, layout.rows, layout.columns, layout.row_stride, layout.column_stride)
    common = {
        "DTYPE": _DTYPES[layout.dtype],
        "GROUPED": launch.is_grouped,
        "INTERPRETED": triton.knobs.runtime.interpret,
    }
    if form.in_blocks:
        grid = (triton.cdiv(layout.rows, BLOCK) * triton.cdiv(layout.columns, BLOCK), launch.matrices)
        quantize_blocks[grid](*matrices, **common, WHOLE=layout.whole, POWER_OF_TWO=power_of_two, **LAUNCH_OPTIONS)
    else:
        is_fp8 = form.dtype.is_floating_point
        grid = (triton.cdiv(layout.rows, _ROWS), launch.matrices)
        quantize_rows[grid](*matrices, **common, FP8=is_fp8, ROWS=_ROWS, COLUMNS=_COLUMNS)


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
    there is one matrix, at ``source``, ``codes``, ``scales``. ``WHOLE``: the caller guarantees that rows and columns
    are multiples of 128, columns are contiguous, rows are less than 2^24 elements apart, and addresses and rows start
    at multiples of 16 bytes.
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
    quantized, scale = _quantize(as_bf16(weights, INTERPRETED), POWER_OF_TWO, INTERPRETED)
    tl.store(scales + block, scale)
    if WHOLE:
        tl.store(codes + first_row * columns + first_column + row * columns + column, quantized)
    else:
        tl.store(codes + row * columns + column, quantized, mask=inside)


@triton.jit
def quantize_rows(
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
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantize matrices ``[rows, columns]`` row by row; grid: (⌈rows / ROWS⌉, matrices).

    ``FP8``: to E4M3, else to INT8. ``GROUPED`` and the rest as for ``quantize_blocks``; strides may be any.
    """
    if GROUPED:
        entry = table + 3 * tl.program_id(1)
        source = tl.load(entry).to(tl.pointer_type(DTYPE))
        codes = tl.load(entry + 1).to(tl.pointer_type(tl.float8e4nv if FP8 else tl.int8))
        scales = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offset = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    largest = tl.zeros([ROWS, COLUMNS], tl.int16)
    for first in range(0, columns, COLUMNS):
        column = first + offset
        inside = (row < rows) & (column < columns)
        weights = tl.load(source + row * row_stride + column * column_stride, mask=inside, other=0.0)
        largest = tl.maximum(largest, as_bf16(weights, INTERPRETED).to(tl.int16, bitcast=True) & 0x7FFF)
    amax_bits = tl.max(largest, 1)[:, None].to(tl.int32) << 16
    amax = tl.maximum(amax_bits, _AMAX_FLOOR_BITS).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, _E4M3_MAX if FP8 else _INT8_MAX)
    tl.store(scales + row, scale, mask=row < rows)
    if not INTERPRETED:
        high, low = split_reciprocal(scale)
    for first in range(0, columns, COLUMNS):
        column = first + offset
        inside = (row < rows) & (column < columns)
        weights = tl.load(source + row * row_stride + column * column_stride, mask=inside, other=0.0)
        weights = as_bf16(weights, INTERPRETED).to(tl.float32)
        if INTERPRETED:  # noqa: SIM108 - what is compiled must not read names that are not there
            quotient = tl.div_rn(weights, scale)
        else:
            quotient = tl.fma(weights, high, weights * low)
        if FP8:
            quantized = (round_to_e4m3(quotient) if INTERPRETED else quotient).to(tl.float8e4nv)
        else:
            integers = (quotient + _TO_INTEGER).to(tl.int32, bitcast=True) - _TO_INTEGER_BITS
            quantized = integers.to(tl.int8)
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
        quotient = round_to_e4m3(tl.div_rn(weights, scale))
    else:
        high, low = split_reciprocal(scale)
        quotient = tl.fma(weights, high, weights * low)
    return quotient.to(tl.float8e4nv), scale


@triton.jit
def as_bf16(weights, INTERPRETED: tl.constexpr):
    if INTERPRETED and weights.dtype != tl.bfloat16:
        bits = weights.to(tl.float32).to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(weights != weights, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return weights.to(tl.bfloat16)


@triton.jit
def split_reciprocal(scale):
    """Return high and low with 1/scale = high + low and 0 ≤ low: a negative low would turn the product of a negative
    zero into +0."""
    nearest = tl.div_rn(1.0, scale)
    bits = nearest.to(tl.int32, bitcast=True)
    below = (bits - 1).to(tl.float32, bitcast=True)
    high = tl.where(tl.fma(-nearest, scale, 1.0) < 0, below, nearest)
    return high, tl.div_rn(tl.fma(-high, scale, 1.0), scale)


@triton.jit
def round_to_e4m3(quotient):
    """Round to nearest even at 3 mantissa bits, or to multiples of 2^-9 below the smallest normal; stays fp32, keeps
    the sign."""
    bits = quotient.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    subnormal = (quotient + _ROUND_TO_SUBNORMALS) - _ROUND_TO_SUBNORMALS
    rounded = tl.where(tl.abs(quotient) < _E4M3_SMALLEST_NORMAL, subnormal, normal)
    sign = bits & -2147483648
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
