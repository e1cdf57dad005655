"""Compress the planes of a delta, each by its content. Needs only numpy; with numba it holds the GIL for less time.

A plane holds one byte each of many numbers (``delta.py``). Gaps between independent changes have a geometric
distribution, whose entropy code is Golomb's. It keeps low bytes as they are, since these are nearly uniform, and uses a
Huffman code for the rest. zlib makes the same of a plane: deflate without matches, since nothing repeats. Where 2% of
elements change, as in a step of BF16 weights, a Huffman code of the low bytes would save 11.6% of them. That takes half
of zlib's time, so a plane is stored if a Huffman code would save less than an eighth.

Most differences are one step up or down. A plane of two values takes one bit per element, and its few exceptions are
listed, many times faster than with zlib. A plane that is nearly all zero is coded in the same way. A plane of only
zeros is empty.
"""

import functools
import zlib
from types import ModuleType

import numpy as np
import numpy.typing as npt

from rollout_service.protocol.plane_codes import (
    DEFLATED,
    EXCEPTION_BYTES,
    EXCEPTIONS,
    LEAST_COUNTED,
    RUNS,
    SAMPLED,
    SAMPLED_EXCEPTIONS,
    STORED,
    TWO_VALUES,
    TWO_VALUES_HEADER,
    UNIFORM,
    Bytes,
    of_two,
    stored,
)

_RAW_DEFLATE = -15
_FOR_LARGE, _FOR_SMALL = (_RAW_DEFLATE, 9), (-12, 6)
"""Window and memory level of deflate, for ``zlib.compressobj``. Setting up the larger ones costs as much time as
deflating 10 000 numbers; they pay off from this many numbers on:"""
_LARGE = 4096


def coded(plane: Bytes) -> bytes:
    """Encode a plane, uint8 [count], contiguous; empty if it is all zeros."""
    code = (_compiled() or _ByNumpy).coded(plane)
    return code if isinstance(code, bytes) else _deflated(plane, code)


def prepare_decoding() -> None:
    """Compile the functions that ``decoded`` needs. Takes seconds, once."""
    decoded(memoryview(of_two(1, 1, 0, b"")), 1)


def _deflated(plane: Bytes, strategy: int) -> bytes:
    window, memory = _FOR_SMALL if plane.size < _LARGE else _FOR_LARGE
    deflate = zlib.compressobj(6, zlib.DEFLATED, window, memory, strategy)
    return bytes([DEFLATED]) + deflate.compress(plane.data) + deflate.flush()


def decoded(code: memoryview, count: int) -> bytes | None:
    """Decode a plane of ``count`` bytes that is not all zeros. Return None if ``code`` is not valid for that size.
    Never decompresses more than ``count`` bytes. Raises ``zlib.error``."""
    kind, content = code[0], code[1:]
    if kind == STORED:
        return bytes(content) if content.nbytes == count else None
    if kind == TWO_VALUES:
        return _of_two_values(code, count)
    if kind != DEFLATED:
        return None
    inflate = zlib.decompressobj(_RAW_DEFLATE)
    values = inflate.decompress(content, count + 1)
    return values if len(values) == count and inflate.eof and not inflate.unused_data else None


def _of_two_values(code: memoryview, count: int) -> bytes | None:
    start = TWO_VALUES_HEADER.size
    if code.nbytes < start:
        return None
    _, first, second, exceptions = TWO_VALUES_HEADER.unpack_from(code)
    end_of_bits = start + (-(-count // 8) if first != second else 0)
    if exceptions > count or code.nbytes != end_of_bits + EXCEPTION_BYTES * exceptions:
        return None
    content = np.frombuffer(
        code.toreadonly(), np.uint8
    )  # always read-only: numba would compile a second version for writable arrays
    end_of_places = end_of_bits + 4 * exceptions
    plane = np.empty(count, np.uint8)
    how = _compiled() or _ByNumpy
    are_inside = how.write_two_values(
        plane, first, second, content[start:end_of_bits], content[end_of_bits:end_of_places], content[end_of_places:]
    )
    return plane.tobytes() if are_inside else None


@functools.cache
def _compiled() -> ModuleType | None:
    try:
        from rollout_service.protocol import compiled_planes
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return None
    return compiled_planes


class _ByNumpy:
    """The functions of ``compiled_planes`` in numpy, for machines without numba."""

    @classmethod
    def coded(cls, plane: Bytes) -> bytes | int:
        nonzero = int(np.count_nonzero(plane))
        if not nonzero:
            return b""
        if plane.size >= LEAST_COUNTED:
            some = plane[:: max(1, plane.size // SAMPLED)]
            counts = np.bincount(some, minlength=256)
            if (code := cls._by_two_values(plane, counts)) is not None:
                return code
            if 256 * int(counts @ counts) < UNIFORM * some.size**2:
                return stored(plane)
        return zlib.Z_RLE if nonzero < (1 - RUNS) * plane.size else zlib.Z_HUFFMAN_ONLY

    @staticmethod
    def _by_two_values(plane: Bytes, counts: npt.NDArray[np.intp]) -> bytes | None:
        """Encode a plane of two values; None if there are too many others. ``counts``: histogram of a sample of its
        bytes."""
        rest = counts.copy()
        first = int(rest.argmax())
        rest[first] = 0
        second = int(rest.argmax())
        rest[second], of_second = 0, int(rest[second])
        counted = int(counts.sum())
        if int(rest.sum()) > SAMPLED_EXCEPTIONS * counted:
            return None
        is_exception, bits = plane != first, b""
        if (
            8 * EXCEPTION_BYTES * of_second < counted
        ):  # one bit per byte would take more space than listing the second value
            second = first
        else:
            is_second = plane == second
            bits = np.packbits(is_second).tobytes()
            is_exception ^= is_second
        exceptions = np.flatnonzero(is_exception)
        if exceptions.size > EXCEPTIONS * plane.size:
            return None
        content = bits + exceptions.astype("<u4").tobytes() + plane[exceptions].tobytes()
        return of_two(first, second, exceptions.size, content)

    @staticmethod
    def write_two_values(plane: Bytes, first: int, second: int, bits: Bytes, places: Bytes, values: Bytes) -> bool:
        if bits.size:
            plane[:] = np.unpackbits(bits, count=plane.size)
            plane *= np.uint8((second - first) % 256)  # bytes wrap around
            plane += np.uint8(first)
        else:
            plane[:] = first
        at = places.view("<u4")
        if at.size and int(at.max()) >= plane.size:
            return False
        plane[at] = values
        return True
