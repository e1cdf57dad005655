"""What makes the Triton kernel exact: w·(high + low) is the IEEE quotient w/s, for all w and s there can be.

w is BF16 and s = amax/448, or amax/127 for INT8, with a BF16 amax. A power of two on either moves the exponents only,
so 128 mantissas of w times 128 of amax are all cases, but for the one scale of blocks below the floor and for powers of
two (where low is 0).
"""

import ctypes
import ctypes.util

import numpy as np
import pytest

FLOOR = np.float32(1e-12)
MANTISSAS = np.arange(128, 256, dtype=np.float32)

libm = ctypes.CDLL(ctypes.util.find_library("m"))
libm.fmaf.restype = ctypes.c_float
libm.fmaf.argtypes = (ctypes.c_float,) * 3
fma = np.vectorize(libm.fmaf, otypes=[np.float32])
"""The C library's: rounded once. numpy has none."""


def split_reciprocal(scale: np.float32) -> tuple[np.float32, np.float32]:
    nearest = np.float32(1) / scale
    high = np.nextafter(nearest, np.float32(0)) if fma(-nearest, scale, 1) < 0 else nearest
    return high, np.float32(fma(-high, scale, 1)) / scale


@pytest.mark.parametrize("largest_code", [448, 127])
def test_the_split_product_is_the_ieee_quotient(largest_code):
    weights = np.concatenate([MANTISSAS, -MANTISSAS, [np.float32(0.0), np.float32(-0.0)]]).astype(np.float32)
    for amax in [*MANTISSAS, FLOOR]:
        scale = np.float32(amax) / np.float32(largest_code)
        high, low = split_reciprocal(scale)
        assert low >= 0
        product = fma(weights, high, weights * low)
        np.testing.assert_array_equal(product.view(np.uint32), (weights / scale).view(np.uint32), f"amax {amax}")
