"""How a plane of a delta is coded, and what decides: ``delta_planes.py``.

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
"""Share of zeros above which runs of them are shorter than one bit each."""
UNIFORM = 3.0
"""How many times more often than of uniform bytes two of a plane are equal, at most, where it is stored: a Huffman code
of geometric numbers would save an eighth."""
EXCEPTIONS = 1 / 32
"""Share of a plane's bytes, at most, that are neither of its two values: they take as much as the others then."""
SAMPLED_EXCEPTIONS = 1.25 * EXCEPTIONS
"""The same of those of its bytes that are counted: with more, which is some three standard deviations, the others are
not looked at."""
SAMPLED = 4096
"""Bytes of a plane, of which these are counted."""
LEAST_COUNTED = 1024
"""Bytes of a plane, of which fewer are deflated sooner than counted: thousands of tensors may have a few changes."""
TWO_VALUES_HEADER = struct.Struct("<BBBI")
EXCEPTION_BYTES = 5


def stored(plane: Bytes) -> bytes:
    """The code of a plane that has its bytes."""
    return bytes([STORED]) + plane.tobytes()


def of_two(first: int, second: int, exceptions: int, content: bytes) -> bytes:
    """The code of a plane of two values. ``content``: bits, places and values."""
    return TWO_VALUES_HEADER.pack(TWO_VALUES, first, second, exceptions) + content
