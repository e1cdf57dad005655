"""The quantizer on the CPU, compiled by numba. It reads each block or row twice while it is cached, and writes it once.

Results are equal, bit for bit, to ``blockwise.quantize_blockwise`` and ``formats.quantize_channelwise``. It uses
IEEE division, then computes E4M3 by integer arithmetic on the quotient's bits, or INT8 from the bits of a sum whose
last bit is worth 1. Every operation has a cast, because numba widens integers to 64 bits, which the compiler cannot
vectorize.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from rollout_service.quant.blockwise import BLOCK, CODES, scale_shape
from rollout_service.quant.formats import channel_scale_shape
from rollout_service.runtime.threads import io_threads

_Array = npt.NDArray[np.generic]
_Matrix = tuple[_Array, _Array, _Array]
"""BF16 bits uint16 [N, K], codes' bits uint8 [N, K], scales fp32 of the blocks or rows."""

_U16, _U32, _F32 = np.uint16, np.uint32, np.float32
_MAGNITUDE_BF16, _MAGNITUDE, _SIGN = _U16(0x7FFF), _U32(0x7FFFFFFF), _U32(0x80)
_AMAX_FLOOR, _E4M3_MAX = _F32(1e-12), _F32(448.0)
_NON_FINITE_BF16 = _U16(0x7F80)
_SMALLEST_NORMAL = _U32(0x3C800000)  # 2^-6
_EXPONENT_SHIFT = _U32((127 - 7) << 3)  # E4M3's bias is 7, fp32's 127
_INT8_MAX, _TO_INTEGER, _TO_INTEGER_BITS = _F32(127.0), _F32(1.5 * 2.0**23), np.int32(0x4B400000)
_TO_SUBNORMAL, _TO_SUBNORMAL_BITS = _F32(2.0**14), _U32(0x46800000)  # fp32 numbers from 2^14 on are 2^-9 apart

_compiled: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", cache=True)


def quantize_blocks_cpu(weight: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes e4m3 and scales fp32 of ``weight`` [N, K] or [E, N, K] on the CPU, of any dtype and strides.

    A block that holds NaN or infinity gets the scale NaN: check the scales before using the codes.
    """
    return _quantize(weight, CODES, scale_shape(tuple(weight.shape)), _quantize_block_rows, power_of_two)


def quantize_channels_cpu(weight: torch.Tensor, *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales fp32 [..., N, 1] of ``weight`` [N, K] or [E, N, K] on the CPU, of any dtype and strides.

    ``dtype``: dtype of the codes, int8 or e4m3.

    A row that holds NaN or infinity gets the scale NaN: check the scales before using the codes.
    """
    shape = channel_scale_shape(tuple(weight.shape))
    return _quantize(weight, dtype, shape, _quantize_channels, dtype.is_floating_point)


def _quantize(
    weight: torch.Tensor,
    dtype: torch.dtype,
    scale_shape: tuple[int, ...],
    quantize_rows: Callable[..., None],
    option: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = weight.detach().to(torch.bfloat16).contiguous()
    codes = torch.empty(weight.shape, dtype=dtype)
    scales = torch.empty(scale_shape, dtype=torch.float32)
    arrays = weight.view(torch.uint16).numpy(), codes.view(torch.uint8).numpy(), scales.numpy()
    matrices = [arrays] if weight.dim() == 2 else list(zip(*arrays, strict=True))
    list(_pool().map(lambda part: quantize_rows(*part, option), _parts(matrices)))
    return codes, scales


def _parts(matrices: list[_Matrix]) -> Iterator[tuple[_Array, _Array, _Array, int, int]]:
    """Split the rows of the matrices' scales into about as many parts as there are threads, at least one per matrix."""
    rows = sum(scales.shape[0] for *_, scales in matrices)
    per_part = max(1, rows // _threads())
    for weight, codes, scales in matrices:
        for first in range(0, scales.shape[0], per_part):
            yield weight, codes, scales, first, min(first + per_part, scales.shape[0])


@cache
def _pool() -> ThreadPoolExecutor:
    # not numba's own threads: two Python threads may not use its default pool at once
    return ThreadPoolExecutor(_threads(), "quantize-cpu")


def _threads() -> int:
    # in an actor that reserves no CPU, such as the ingest, Ray limits torch to one thread
    return max(torch.get_num_threads(), io_threads())


@_compiled
def _quantize_block_rows(weight, codes, scales, first, end, power_of_two):
    """Quantize rows of blocks ``[first, end)``. ``weight``: BF16 bits uint16 [N, K]; ``codes`` uint8 [N, K]; ``scales``
    fp32."""
    rows, columns = weight.shape
    largest = np.empty(BLOCK, _U16)
    for i in range(first, end):
        top, bottom = i * BLOCK, min((i + 1) * BLOCK, rows)
        for j in range(scales.shape[1]):
            left, right = j * BLOCK, min((j + 1) * BLOCK, columns)
            largest[:] = 0
            for row in range(top, bottom):
                _keep_largest(weight[row, left:right], largest)
            scale = _scale(largest.max(), power_of_two)
            scales[i, j] = scale
            for row in range(top, bottom):
                _encode(weight[row, left:right], codes[row, left:right], scale)


@_compiled
def _quantize_channels(weight, codes, scales, first, end, is_fp8):
    """Quantize rows ``[first, end)``. ``weight``: BF16 bits uint16 [N, K]; ``codes`` uint8 [N, K]; ``scales`` fp32 [N,
    1]."""
    for row in range(first, end):
        largest = _U16(0)
        for k in range(weight.shape[1]):
            magnitude = weight[row, k] & _MAGNITUDE_BF16
            largest = magnitude if magnitude > largest else largest
        if largest >= _NON_FINITE_BF16:
            scales[row, 0] = _F32(np.nan)
            codes[row] = 0
            continue
        amax = _U32(_U32(largest) << _U32(16)).view(_F32)
        scale = _F32(max(amax, _AMAX_FLOOR) / (_E4M3_MAX if is_fp8 else _INT8_MAX))
        scales[row, 0] = scale
        if is_fp8:
            _encode(weight[row], codes[row], scale)
        else:
            _encode_integers(weight[row], codes[row], scale)


@_compiled
def _encode_integers(weights, codes, scale):
    for k in range(weights.size):
        # no clamp: the largest quotient is 127 or the next fp32 number
        quotient = _F32(_U32(_U32(weights[k]) << _U32(16)).view(_F32) / scale)
        codes[k] = np.uint8(_F32(quotient + _TO_INTEGER).view(np.int32) - _TO_INTEGER_BITS)


@_compiled
def _keep_largest(weights, largest):
    for k in range(weights.size):
        magnitude = weights[k] & _MAGNITUDE_BF16
        largest[k] = magnitude if magnitude > largest[k] else largest[k]


@_compiled
def _scale(amax_bits, power_of_two):
    if amax_bits >= _NON_FINITE_BF16:
        return _F32(np.nan)
    amax = _U32(_U32(amax_bits) << _U32(16)).view(_F32)
    scale = _F32(max(amax, _AMAX_FLOOR) / _E4M3_MAX)
    if power_of_two:
        return _U32(_U32(scale.view(_U32) + _U32(0x7FFFFF)) & _U32(0x7F800000)).view(_F32)
    return scale


@_compiled
def _encode(weights, codes, scale):
    for k in range(weights.size):
        bits = _F32(_U32(_U32(weights[k]) << _U32(16)).view(_F32) / scale).view(_U32)
        magnitude = _U32(bits & _MAGNITUDE)
        to_even = _U32(_U32(0x7FFFF) + _U32(_U32(magnitude >> _U32(20)) & _U32(1)))
        normal = _U32(_U32(_U32(magnitude + to_even) >> _U32(20)) - _EXPONENT_SHIFT)
        subnormal = _U32(_F32(magnitude.view(_F32) + _TO_SUBNORMAL).view(_U32) - _TO_SUBNORMAL_BITS)
        code = subnormal if magnitude < _SMALLEST_NORMAL else normal
        codes[k] = np.uint8(_U32(code | _U32(_U32(bits >> _U32(24)) & _SIGN)))
