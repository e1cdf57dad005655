"""Encode the difference between two versions of a tensor, without loss. Needs only numpy and zstandard.

One step of an RL trainer changes few elements, most of them to the next larger or smaller value of their dtype. The
encoding of a tensor therefore has two sequences of integers. The first holds the gaps between changed elements. The
second holds the difference of the new and the old bit pattern, as integers of the element's size that wrap around.
Differences are in zigzag order (0, -1, 1, -2, …), so that a small step up or down is a small number.

In both sequences the low bytes vary widely, while the high bytes have few values, mostly zero. The integers are split
into planes: all lowest bytes, then all second bytes, and so on. zstd compresses each plane by itself. If all changes
are one step, a change takes 12.1 bits where 0.3% of the elements change (entropy: 10.8), and 10.2 at 1% (9.1).

A tensor is cut into segments of ``SEGMENT_BYTES``, so that several threads can work on a large one. The size of a
segment bounds its decoded size, whatever the bytes contain. Format, little-endian:

    unchanged   0
    changed     1, count uint32, the planes' lengths uint32 [3 + bytes an element], and the planes: 3 of the gaps, each
                the number of unchanged elements before a changed one, then those of the differences. Each is a zstd
                frame of ``count`` bytes. Length 0: zeros.
    whole       2, and the segment's new bytes
"""

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

SEGMENT_BYTES = 16 << 20
"""Size of a segment in bytes. A multiple of every element size; positions in a segment fit into the planes of a gap."""

Array = npt.NDArray[Any]
"""A one-dimensional array of integers."""

_UNCHANGED, _CHANGED, _WHOLE = range(3)
NOTHING = bytes([_UNCHANGED])
"""The encoding of a segment without changes."""
GAP_PLANES = 3
SPARSE = 0.25
"""Share of changed elements above which a segment is sent whole, because positions would be most of its bytes."""
_SMALL_BYTES = 4096
"""Largest size in bytes of a small tensor, such as an expert's scales: there are thousands, mostly unchanged."""
UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Unsigned integer dtype for each element size in bytes."""
_LEVEL = 1
"""zstd's fastest level: higher ones save 1% at several times the time."""
_FRAME = zstandard.ZstdCompressionParameters.from_level(
    _LEVEL, write_content_size=False, write_checksum=False, write_dict_id=False
)


class _Codec(threading.local):
    """zstd's contexts, which one thread at a time may use."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_FRAME)
        self.decompressor = zstandard.ZstdDecompressor()


_codec = _Codec()


class Segment(NamedTuple):
    """The encoded changes of one segment of a tensor. Several threads may apply segments of one tensor at once."""

    number: int
    place: slice
    """The segment's bytes in the tensor."""
    encoded: memoryview


def segments(nbytes: int) -> Iterator[slice]:
    """Yield the byte range of each segment of a tensor, in order."""
    for start in range(0, nbytes, SEGMENT_BYTES):
        yield slice(start, min(start + SEGMENT_BYTES, nbytes))


def encode_segment(base: memoryview, new: memoryview, itemsize: int) -> bytes:
    """Encode the changes from ``base`` to ``new``, one segment of a tensor with elements of ``itemsize`` bytes."""
    positions, differences = changed_elements(base, new, itemsize)
    return encode_changes(positions, differences, new.nbytes) or encode_whole(new)


def encode_changes(positions: Array, differences: Array, nbytes: int) -> bytes | None:
    """Encode a segment of ``nbytes`` bytes from the positions and differences of its changes.

    Args:
        positions: integers, ascending: the changed elements.
        differences: their new bits minus their old ones, of an integer dtype as large as an element.

    Return None if the segment's new bytes are smaller than the encoded changes; use ``encode_whole`` then.
    """
    itemsize = differences.itemsize
    if not positions.size:
        return NOTHING
    if not is_sparse(positions.size, itemsize, nbytes):
        return None
    gaps = np.empty(positions.size, np.uint32)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1] + 1, out=gaps[1:], casting="unsafe")
    planes = np.empty((GAP_PLANES + itemsize, positions.size), np.uint8)
    for rows, numbers in ((planes[:GAP_PLANES], gaps), (planes[GAP_PLANES:], _zigzag(differences))):
        rows[:] = numbers.view(np.uint8).reshape(-1, numbers.itemsize)[:, : len(rows)].T
    return encode_planes(planes, nbytes)


def is_sparse(count: int, itemsize: int, nbytes: int) -> bool:
    """Return True if few enough elements of ``nbytes`` bytes have changed to encode each of them."""
    return count * itemsize <= SPARSE * nbytes


def encode_planes(planes: Array, nbytes: int) -> bytes | None:
    """Encode a segment from planes that the caller has already made; otherwise like ``encode_changes``.

    Args:
        planes: uint8 [``GAP_PLANES`` + bytes an element, changes], rows contiguous, at least one change, and
            ``is_sparse``: planes of the gaps, then of the differences in zigzag order, the lowest bytes first.
    """
    coded = [_codec.compressor.compress(plane.data) if plane.any() else b"" for plane in planes]
    itemsize, count = len(planes) - GAP_PLANES, planes.shape[1]
    encoded = _header(itemsize).pack(_CHANGED, count, *map(len, coded)) + b"".join(coded)
    return encoded if len(encoded) < nbytes else None


def encode_whole(new: memoryview) -> bytes:
    """Encode a segment by all of its bytes."""
    return bytes([_WHOLE]) + bytes(new)


def is_small_and_equal(base: memoryview, new: memoryview) -> bool:
    """Return True if a small tensor is unchanged. Comparing bytes is faster than numpy for these; larger ones return
    False."""
    return new.nbytes <= _SMALL_BYTES and bytes(base) == bytes(new)


def joined(encoded: list[bytes]) -> bytes:
    """Join the encoded segments of a tensor, in order; empty if nothing changed in any."""
    return b"" if all(segment == NOTHING for segment in encoded) else b"".join(encoded)


def changed_segments(encoded: memoryview, nbytes: int, itemsize: int) -> list[Segment]:
    """Return the changed segments of a tensor of ``nbytes`` bytes.

    Raises ValueError, which names the segment, if a segment's header is invalid.
    """
    position, found = 0, []
    for number, place in enumerate(segments(nbytes)):
        with _name_segment(number):
            end = position + _encoded_size(encoded[position:], place.stop - place.start, itemsize)
        if encoded[position] != _UNCHANGED:
            found.append(Segment(number, place, encoded[position:end]))
        position = end
    if position != encoded.nbytes:
        raise ValueError(f"{encoded.nbytes - position} bytes are left over after the last segment")
    return found


def apply_segment(segment: Segment, data: memoryview, itemsize: int) -> Array:
    """Replace the old bytes of one segment, in ``data``, by the new ones. Return the new values of the encoded
    elements.

    Raises ValueError, which names the segment, if it is not valid for data of this size.
    """
    elements = np.frombuffer(data, UNSIGNED[itemsize])
    if (new := new_bytes(segment)) is not None:
        elements[:] = np.frombuffer(new, elements.dtype)
        return elements
    positions, differences = decode_changes(segment, data.nbytes, itemsize)
    differences += elements[positions]
    elements[positions] = differences
    return differences


def inflated(segment: Segment, itemsize: int) -> tuple[int, list[bytes]]:
    """Return the number of changes in a segment and its decoded planes, for callers that join the planes themselves.

    Each plane has one byte per change: ``GAP_PLANES`` planes of gaps, then the differences in zigzag order. An empty
    plane means zeros. Positions are not yet checked against the segment's size. Raises ValueError like
    ``apply_segment``.
    """
    with _name_segment(segment.number):
        return _inflate(segment.encoded, itemsize)


def new_bytes(segment: Segment) -> memoryview | None:
    """Return all bytes of a segment that was sent whole, or None for one that has changes: see ``decode_changes``."""
    return segment.encoded[1:] if segment.encoded[0] == _WHOLE else None


def decode_changes(segment: Segment, nbytes: int, itemsize: int) -> tuple[Array, Array]:
    """Invert ``encode_changes`` for a segment of ``nbytes`` bytes. Differences are unsigned integers.

    Raises ValueError like ``apply_segment``.
    """
    size = nbytes // itemsize
    with _name_segment(segment.number):
        count, planes = _inflate(segment.encoded, itemsize)
        positions = _join_planes(planes[:GAP_PLANES], count, np.dtype("<i8"))
        positions[1:] += 1
        np.cumsum(positions, out=positions)
        if positions[-1] >= size:
            raise ValueError(f"its last change is at element {positions[-1]} of {size}")
        return positions, _unzigzag(_join_planes(planes[GAP_PLANES:], count, UNSIGNED[itemsize]))


@contextmanager
def _name_segment(segment: int) -> Iterator[None]:
    """Add the segment's number to errors: raise ValueError in place of ValueError and ZstdError."""
    try:
        yield
    except (ValueError, zstandard.ZstdError) as error:
        raise ValueError(f"segment {segment}: {error}") from error


def changed_elements(base: memoryview, new: memoryview, itemsize: int) -> tuple[Array, Array]:
    """Return positions (int64) and differences of the elements that differ, as ``encode_changes`` takes them."""
    # compare eight bytes at a time, since few of these words differ
    dtype = UNSIGNED[itemsize]
    old, now = np.frombuffer(base, dtype), np.frombuffer(new, dtype)
    shift = 4 - old.itemsize.bit_length()  # binary logarithm of the number of elements in a word
    whole = old.size >> shift << shift
    words_old, words_now = old[:whole].view("<u8"), now[:whole].view("<u8")
    words = np.flatnonzero(words_old != words_now)
    differences = words_now[words].view(old.dtype)
    differences -= words_old[words].view(old.dtype)
    inside = np.flatnonzero(differences != 0)  # booleans, because numpy takes five times as long for integers
    positions = (words[inside >> shift] << shift) + (inside & ((1 << shift) - 1))
    if whole == old.size:
        return positions, differences[inside]
    rest = now[whole:] - old[whole:]
    last = np.flatnonzero(rest)
    return np.concatenate([positions, last + whole]), np.concatenate([differences[inside], rest[last]])


def _zigzag(difference: Array) -> Array:
    signed = difference.view(f"<i{difference.itemsize}")
    code: Array = (signed << 1) ^ (signed >> (8 * signed.itemsize - 1))
    return code.view(difference.dtype)


def _unzigzag(code: Array) -> Array:
    one = code.dtype.type(1)
    difference: Array = (code >> one) ^ np.negative(code & one)
    return difference


def _header(itemsize: int) -> struct.Struct:
    return struct.Struct(f"<BI{GAP_PLANES + itemsize}I")


def _encoded_size(encoded: memoryview, nbytes: int, itemsize: int) -> int:
    """Return the encoded size of the first segment in ``encoded``, whose decoded size is ``nbytes``."""
    if not encoded.nbytes:
        raise ValueError("it is not there")
    kind = int(encoded[0])
    if kind == _UNCHANGED:
        return 1
    if kind == _WHOLE:
        if encoded.nbytes <= nbytes:
            raise ValueError(f"{encoded.nbytes - 1} bytes of {nbytes} are there")
        return 1 + nbytes
    if kind != _CHANGED:
        raise ValueError(f"it begins with {kind}, which is no kind of segment")
    header = _header(itemsize)
    if header.size > encoded.nbytes:
        raise ValueError("it ends in its header")
    count, *lengths = map(int, header.unpack_from(encoded)[1:])
    if not 0 < count <= nbytes // itemsize:
        raise ValueError(f"{count} changes in {nbytes // itemsize} elements")
    end = header.size + sum(lengths)
    if end > encoded.nbytes:
        raise ValueError(f"its planes have {sum(lengths)} bytes, and {encoded.nbytes - header.size} are there")
    return end


def _inflate(encoded: memoryview, itemsize: int) -> tuple[int, list[bytes]]:
    """Return the number of changes in a segment and its planes; an empty plane means zeros.

    No plane is decompressed beyond one byte per change.
    """
    header = _header(itemsize)
    count, *lengths = map(int, header.unpack_from(encoded)[1:])
    planes, start = [], header.size
    for plane, length in enumerate(lengths):
        values = _decompress(encoded[start : start + length], count) if length else b""
        if values is None:
            raise ValueError(f"plane {plane} does not decode to {count} bytes and end there")
        planes.append(values)
        start += length
    return count, planes


def _decompress(frame: memoryview, count: int) -> bytes | None:
    """Return ``count`` bytes; None if the frame holds another number. Raises ``zstandard.ZstdError``."""
    declared = zstandard.get_frame_parameters(frame).content_size
    if declared != zstandard.CONTENTSIZE_UNKNOWN:  # the decompressor would take that much memory
        return None
    values: bytes = _codec.decompressor.decompress(frame, max_output_size=count, allow_extra_data=False)
    return values if len(values) == count else None


def _join_planes(planes: list[bytes], count: int, dtype: np.dtype[Any]) -> Array:
    """Join planes into ``count`` numbers."""
    numbers = np.frombuffer(planes[0], np.uint8).astype(dtype) if planes[0] else np.zeros(count, dtype)
    of_each = numbers.view(np.uint8).reshape(-1, numbers.itemsize)
    for plane, values in enumerate(planes[1:], start=1):
        if values:
            of_each[:, plane] = np.frombuffer(values, np.uint8)
    return numbers
