"""Encode and decode delta planes with loops that numba compiles. Each takes one call, which releases the GIL.

The numpy version makes ten calls, each of which releases and takes the GIL, so its threads wait for each other. The
byte format is described in ``plane_codes.py``.
"""

import zlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from rollout_service.protocol.plane_codes import (
    EXCEPTION_BYTES,
    EXCEPTIONS,
    LEAST_COUNTED,
    RUNS,
    SAMPLED,
    SAMPLED_EXCEPTIONS,
    UNIFORM,
    Bytes,
    of_two,
    stored,
)

_compiled: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", cache=True)
_Word = np.uint64
"""Eight bytes of a plane, the first one lowest. Unsigned, so that numba does not check an index for negative values."""
_LOW_BITS, _HIGH_BITS = _Word(0x0101010101010101), _Word(0x8080808080808080)
"""The lowest and the highest bit of each of the eight bytes."""
_GATHER = _Word(0x8040201008040201)
"""Multiplier that gathers or spreads bits. Times a word of bytes 0 or 1, the product's highest byte has them as its
bits, the first one highest. Times a byte, the highest bit of each byte of the product is a bit of that byte; the first
byte is the exception, one position below."""
_ZEROS, _STORED, _TWO_VALUES, _RLE, _HUFFMAN = range(5)


def coded(plane: Bytes) -> bytes | int:
    """Return the code of a plane, or the zlib strategy with which it should be deflated."""
    bits_bytes, most = -(-plane.size // 8), int(EXCEPTIONS * plane.size)
    content = np.empty(bits_bytes + EXCEPTION_BYTES * most, np.uint8)
    kind, first, second, exceptions = _code(plane, content, most)
    if kind == _TWO_VALUES:
        nbytes = EXCEPTION_BYTES * exceptions + (bits_bytes if first != second else 0)
        return of_two(first, second, exceptions, content[:nbytes].tobytes())
    if kind == _STORED:
        return stored(plane)
    return b"" if kind == _ZEROS else zlib.Z_RLE if kind == _RLE else zlib.Z_HUFFMAN_ONLY


def write_two_values(plane: Bytes, first: int, second: int, bits: Bytes, places: Bytes, values: Bytes) -> bool:
    """Decode a plane of two values in place. ``places`` holds uint32. Return False if a place lies outside the
    plane."""
    return bool(_decode(plane, np.uint8(first), np.uint8(second), bits, places, values))


@_compiled
def _code(plane, content, most):
    """Choose the code of a plane and write its content. ``content``, uint8, has room for a plane of two values and
    ``most`` exceptions, without the header. Return the kind, both values and the number of exceptions."""
    count = plane.size
    nonzero = np.int64(0)
    for i in range(count):
        nonzero += plane[i] != 0
    if nonzero == 0:
        return _ZEROS, 0, 0, 0
    if count >= LEAST_COUNTED:
        counts = np.zeros(256, np.int64)
        for i in range(0, count, max(1, count // SAMPLED)):
            counts[plane[i]] += 1
        counted = counts.sum()
        first = np.argmax(counts)
        of_first = counts[first]
        counts[first] = 0
        second = np.argmax(counts)
        of_second = counts[second]
        counts[first] = of_first
        if counted - of_first - of_second <= SAMPLED_EXCEPTIONS * counted:
            if 8 * EXCEPTION_BYTES * of_second < counted:  # a bit for each byte would be more
                second = first
            exceptions = _code_two_values(plane, np.uint8(first), np.uint8(second), content, most)
            if exceptions >= 0:
                return _TWO_VALUES, first, second, exceptions
        if 256 * (counts * counts).sum() < UNIFORM * counted * counted:
            return _STORED, 0, 0, 0
    return (_RLE if nonzero < (1 - RUNS) * count else _HUFFMAN), 0, 0, 0


@_compiled
def _code_two_values(plane, first, second, content, most):
    """Return the number of exceptions, or -1 if there are more than ``most``."""
    exceptions = np.int64(0)
    places = np.empty(most, np.uint32)
    for number in range((plane.size + 7) >> 3):
        word, missing = _word(plane, _Word(8 * number))
        is_second = _equal_bytes(word, second) & ~missing
        if first != second:
            content[number] = np.uint8(((is_second >> _Word(7)) * _GATHER) >> _Word(56))
        others = ~(is_second | _equal_bytes(word, first) | missing) & _HIGH_BITS
        if not others:
            continue
        for i in range(8):
            if (others >> _Word(8 * i)) & _Word(0x80):
                if exceptions == most:
                    return np.int64(-1)
                places[exceptions] = 8 * number + i
                exceptions += 1
    _write_exceptions(plane, places[:exceptions], content[0 if first == second else (plane.size + 7) >> 3 :])
    return exceptions


@_compiled
def _word(plane, start):
    """Load eight bytes. Return them and a mask of the bytes beyond the plane's end."""
    word, missing = _Word(0), _Word(0)
    if start + _Word(8) <= _Word(plane.size):
        for i in range(8):  # the compiler makes this one load, since all eight bytes exist
            word |= _Word(plane[start + _Word(i)]) << _Word(8 * i)
        return word, missing
    for i in range(8):
        if start + _Word(i) < _Word(plane.size):
            word |= _Word(plane[start + _Word(i)]) << _Word(8 * i)
        else:
            missing |= _Word(0xFF) << _Word(8 * i)
    return word, missing


@_compiled
def _write_exceptions(plane, places, content):
    for number in range(places.size):
        place = places[number]
        for byte in range(4):
            content[4 * number + byte] = np.uint8(place >> np.uint32(8 * byte))
        content[4 * places.size + number] = plane[place]


@_compiled
def _equal_bytes(word, value):
    """Return the highest bit of each of the eight bytes that equal ``value``."""
    other = word ^ (_Word(value) * _LOW_BITS)
    return ~(((other & ~_HIGH_BITS) + ~_HIGH_BITS) | other) & _HIGH_BITS


@_compiled
def _decode(plane, first, second, bits, places, values):
    count = plane.size
    if bits.size:
        step = np.uint8(second - first)  # bytes wrap around
        for number in range((count + 7) >> 3):
            spread = ((_Word(bits[number]) * _GATHER) >> _Word(7)) & _LOW_BITS
            start = _Word(8 * number)
            for i in range(min(8, count - 8 * number)):
                is_second = np.uint8(spread >> _Word(8 * i))
                plane[start + _Word(i)] = np.uint8(first + np.uint8(is_second * step))
    else:
        plane[:] = first
    for number in range(values.size):
        place = np.int64(0)
        for byte in range(4):
            place |= np.int64(places[4 * number + byte]) << (8 * byte)
        if place >= count:
            return False
        plane[place] = values[number]
    return True
