"""Apply the changes of a segment with a loop that numba compiles: one pass, which releases the GIL.

The numpy version makes fifteen passes, each of which releases and takes the GIL, and so waits for other threads.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from rollout_service.protocol import delta

_compiled: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", cache=True)
_NO_PLANE = np.frombuffer(b"0", np.uint8)[:0]
"""Read-only like the other arrays; numba would compile the loop a second time for writable ones."""
_MOST_BYTES = 4
"""Maximum size of an element in bytes."""


def apply_segment(segment: delta.Segment, data: memoryview, itemsize: int) -> delta.Array:
    """Apply the changes of a segment, like ``delta.apply_segment``. Raises ValueError."""
    if delta.new_bytes(segment) is not None:
        return delta.apply_segment(segment, data, itemsize)
    count, planes = delta.inflated(segment, itemsize)
    elements = np.frombuffer(data, delta.UNSIGNED[itemsize])
    became = np.empty(count, elements.dtype)
    arrays = [np.frombuffer(plane, np.uint8) if plane else _NO_PLANE for plane in planes]
    arrays += [_NO_PLANE] * (delta.GAP_PLANES + _MOST_BYTES - len(arrays))
    last = _add(elements, became, *arrays)
    with delta.naming(segment.number):
        delta.require_inside(last, elements.size)
    return became


@_compiled
def _add(elements, became, gap_0, gap_1, gap_2, code_0, code_1, code_2, code_3):
    """Add its difference to each changed element of ``elements``; ``became`` [changes] receives the sums.

    ``gap_*``, ``code_*``: uint8 [changes], or [0] for zeros: planes of the gaps, and of the differences in zigzag
    order. Return the last position. Stops at the first position beyond the last element, and returns that.
    """
    one = np.uint32(1)
    position = np.int64(-1)
    for i in range(became.size):
        position += 1
        if gap_0.size:
            position += np.int64(gap_0[i])
        if gap_1.size:
            position += np.int64(gap_1[i]) << 8
        if gap_2.size:
            position += np.int64(gap_2[i]) << 16
        if position >= elements.size:
            break
        code = np.uint32(0)
        if code_0.size:
            code |= np.uint32(code_0[i])
        if code_1.size:
            code |= np.uint32(np.uint32(code_1[i]) << np.uint32(8))
        if code_2.size:
            code |= np.uint32(np.uint32(code_2[i]) << np.uint32(16))
        if code_3.size:
            code |= np.uint32(np.uint32(code_3[i]) << np.uint32(24))
        difference = np.uint32(np.uint32(code >> one) ^ np.uint32(~np.uint32(code & one) + one))
        became[i] = np.uint32(np.uint32(elements[position]) + difference)  # keep the lowest bytes: it wraps around
        elements[position] = became[i]
    return position
