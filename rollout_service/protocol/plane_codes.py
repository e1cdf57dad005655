"""Binary format of a coded delta plane, and the thresholds that choose the code: see ``delta_planes.py``.

deflated    0, raw deflate
stored      1, the bytes
two values  2, the values a and b, how many exceptions uint32; if a and b differ a bit for each byte, 1 for b, the
            first one the highest of its byte; the exceptions' places uint32, and their values; little-endian
"""

import struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]

DEFLATED, STORED, TWO_VALUES = range(3)
RUNS = 0.9
"""Share of zeros above which a run-length code takes less than one bit per zero."""
UNIFORM = 3.0
"""Stored planes have at most this many times the probability of two equal bytes that uniform bytes have. Above it, a
Huffman code of geometric numbers would save an eighth."""
EXCEPTIONS = 1 / 32
"""Maximum share of a plane's bytes that are neither of its two values. Above it, the exceptions take more space than
the rest."""
SAMPLED_EXCEPTIONS = 1.25 * EXCEPTIONS
"""The same limit for a sample of its bytes, about three standard deviations higher. Above it, the whole plane is not
tried."""
SAMPLED = 4096
"""Size in bytes of the sample of a plane that is counted."""
LEAST_COUNTED = 1024
"""Minimum plane size in bytes for counting. Smaller planes are deflated sooner than counted, and thousands of tensors
may have a few changes."""
TWO_VALUES_HEADER = struct.Struct("<BBBI")
EXCEPTION_BYTES = 5


def stored(plane: Bytes) -> bytes:
    """Return the code of a plane that is stored unchanged."""
    return bytes([STORED]) + plane.tobytes()


def of_two(first: int, second: int, exceptions: int, content: bytes) -> bytes:
    """Return the code of a plane of two values. ``content``: bits, places and values."""
    return TWO_VALUES_HEADER.pack(TWO_VALUES, first, second, exceptions) + content
