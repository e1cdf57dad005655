"""Blockwise FP8 computed a second way, from the formula alone: numpy and fractions, no torch.

E4M3 (OCP 8-bit floating point, "fn" variant): sign, 4 exponent bits with bias 7, 3 mantissa bits; exponent 15 with
mantissa 7 is NaN, and there is no infinity.
"""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

SIGN = 0x80
NAN_CODE = 0x7F


def value_of(code: int) -> Fraction | None:
    """What a code stands for; None for NaN."""
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if (exponent, mantissa) == (15, 7):
        return None
    if exponent == 0:
        magnitude = Fraction(mantissa, 8) * Fraction(1, 2**6)
    else:
        magnitude = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -magnitude if code & SIGN else magnitude


POSITIVE = [value for value in map(value_of, range(NAN_CODE)) if value is not None]
"""Values of the codes 0 to 126, growing."""


def nearest_code(x: Fraction) -> int:
    """The code whose value is nearest to ``x >= 0``; of two equally near the one with the even mantissa."""
    return min(range(len(POSITIVE)), key=lambda code: (abs(POSITIVE[code] - x), code % 2))


_MIDPOINTS = np.array([float((low + high) / 2) for low, high in pairwise(POSITIVE)])


def encode(x: Floats) -> Bytes:
    """``nearest_code`` of every element of ``x``, at most 448 in magnitude, with its sign; -0 keeps its sign too.

    Exact: a float32 and the midpoints between codes are both float64 numbers, and are only compared.
    """
    magnitude = np.abs(x).astype(np.float64)
    code = np.searchsorted(_MIDPOINTS, magnitude, side="left")
    halfway = np.append(_MIDPOINTS, np.inf)[code] == magnitude
    code = code + (halfway & (code % 2 == 1))
    signed: Bytes = (code + np.where(np.signbit(x), SIGN, 0)).astype(np.uint8)
    return signed


def bf16_rounded(x: Floats) -> Floats:
    """Finite float32 rounded to BF16, nearest even, by its bits."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def quantize(weight: Floats) -> tuple[Bytes, Floats]:
    """Codes [N, K] and scales [⌈N/128⌉, ⌈K/128⌉] of ``weight`` [N, K], block by block."""
    weight = bf16_rounded(np.ascontiguousarray(weight))
    rows, columns = weight.shape
    codes = np.zeros(weight.shape, dtype=np.uint8)
    scales = np.zeros((-(-rows // 128), -(-columns // 128)), dtype=np.float32)
    for i, j in np.ndindex(*scales.shape):
        block = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        amax = np.abs(weight[block]).max()
        scales[i, j] = np.maximum(amax, np.float32(1e-12)) / np.float32(448)
        codes[block] = encode(np.clip(weight[block] / scales[i, j], np.float32(-448), np.float32(448)))
    return codes, scales


def dequantize(codes: Bytes, scales: Floats) -> Floats:
    """``q·s`` in fp32, element by element."""
    values = np.array([np.nan if (v := value_of(code)) is None else float(v) for code in range(256)], dtype=np.float32)
    rows, columns = np.indices(codes.shape)
    product: Floats = values[codes] * scales[rows // 128, columns // 128]
    return product
