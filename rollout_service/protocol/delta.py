"""What changed in a tensor, as bytes: exactly the new tensor comes out of the old one and these. Needs numpy alone.

One step of an RL trainer changes few elements, most of them to the next larger or smaller number of their dtype. So
what is sent of a tensor are the gaps between the elements that changed, and by how much each did: the difference of the
old and the new bit pattern, integers of that size that wrap around; in zigzag order (0, -1, 1, -2, …), so that a small
step up or down is a small number.

Both are sequences of integers whose low bytes are spread out and whose high bytes are few values, most of them zero.
They are taken apart into planes, all lowest bytes, then all second bytes, and each plane is coded by what is in it
(``delta_planes.py``). If all changes are one step, one takes 10.9 bits where 0.3% change, and its entropy is 10.8;
where 2% do, 9.2 and 8.1, of which a Huffman code of the low bytes would save 0.9; where 5% do, 6.8 and 6.7. Each 1% of
other steps adds 0.4 bits, and more than 3% of them are for zlib.

A tensor is cut into segments of ``SEGMENT_BYTES``, so that several threads work on a large one, and what a segment
decodes to is bounded by its size, whatever the bytes say. Little-endian:

    unchanged   0
    changed     1, count uint32, the planes' lengths uint32 [3 + bytes an element], and the planes: 3 of the gaps, each
                the number of unchanged elements before a changed one, then those of the differences. Length 0: zeros.
    whole       2, and the segment's new bytes
"""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_service.protocol import delta_planes

SEGMENT_BYTES = 16 << 20
"""A multiple of every element's size; positions in it fit into the planes of a gap."""

Array = npt.NDArray[Any]
"""Integers, in one dimension."""

_UNCHANGED, _CHANGED, _WHOLE = range(3)
NOTHING = bytes([_UNCHANGED])
"""A segment in which nothing has changed."""
GAP_PLANES = 3
SPARSE = 0.25
"""Share of changed elements above which a segment is sent as a whole: its positions are most of its bytes then, and
zlib takes longer than a network."""
_SMALL_BYTES = 4096
"""A tensor like the scales of an expert, of which there are thousands, most of them unchanged."""
UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Bits of elements, by their bytes."""
_SHIFTS = {1: 0, 2: 1, 4: 2}
"""Binary logarithms of the sizes of elements."""


class Segment(NamedTuple):
    """What changes one segment of a tensor. Several threads may apply those of one tensor."""

    number: int
    place: slice
    """Its bytes in the tensor."""
    encoded: memoryview


def segments(nbytes: int) -> Iterator[slice]:
    """The bytes of each segment of a tensor, in order."""
    for start in range(0, nbytes, SEGMENT_BYTES):
        yield slice(start, min(start + SEGMENT_BYTES, nbytes))


def encode_segment(base: memoryview, new: memoryview, itemsize: int) -> bytes:
    """What changed from ``base`` to ``new``: one segment of a tensor with elements of ``itemsize`` bytes."""
    positions, differences = changed_elements(base, new, itemsize)
    return encode_changes(positions, differences, new.nbytes) or encode_whole(new)


def encode_changes(positions: Array, differences: Array, nbytes: int) -> bytes | None:
    """A segment of ``nbytes`` bytes, by what was found to have changed in it.

    Args:
        positions: integers, ascending: of the elements that changed.
        differences: their new bits minus their old ones, of an integer dtype as large as an element.

    Returns None if the segment's new bytes are fewer: ``encode_whole``.
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
    """Whether so few elements of ``nbytes`` bytes have changed that they are told one by one."""
    return count * itemsize <= SPARSE * nbytes


def encode_planes(planes: Array, nbytes: int) -> bytes | None:
    """As ``encode_changes``, for who takes the numbers apart otherwise.

    Args:
        planes: uint8 [``GAP_PLANES`` + bytes an element, changes], rows contiguous, at least one change, and
            ``is_sparse``: of the gaps, then of the differences in zigzag order, the lowest bytes first.
    """
    coded = [delta_planes.coded(plane) for plane in planes]
    itemsize, count = len(planes) - GAP_PLANES, planes.shape[1]
    encoded = _header(itemsize).pack(_CHANGED, count, *map(len, coded)) + b"".join(coded)
    return encoded if len(encoded) < nbytes else None


def encode_whole(new: memoryview) -> bytes:
    """A segment by all of its bytes."""
    return bytes([_WHOLE]) + bytes(new)


def is_whole(encoded: bytes) -> bool:
    """Whether that is what a segment is."""
    return encoded[0] == _WHOLE


def encode(base: memoryview, new: memoryview, itemsize: int) -> bytes:
    """What changed in a whole tensor; empty if nothing did. Raises ValueError for tensors of different sizes."""
    if base.nbytes != new.nbytes:
        raise ValueError(f"a tensor of {base.nbytes} bytes does not become one of {new.nbytes}")
    return joined([encode_segment(base[part], new[part], itemsize) for part in segments(new.nbytes)])


def is_small_and_equal(base: memoryview, new: memoryview) -> bool:
    """Whether nothing has changed in a tensor of which that is seen sooner than numpy is called."""
    return new.nbytes <= _SMALL_BYTES and bytes(base) == bytes(new)


def joined(encoded: list[bytes]) -> bytes:
    """A tensor out of its segments, in order; empty if nothing changed in any."""
    return b"" if all(segment == NOTHING for segment in encoded) else b"".join(encoded)


def apply(encoded: memoryview, tensor: memoryview, itemsize: int) -> None:
    """Make the old bytes in ``tensor`` the new ones.

    Raises ValueError, with the segment, for bytes that are no encoding of a tensor of this size; the tensor is neither
    the old nor the new one then.
    """
    for segment in changed_segments(encoded, tensor.nbytes, itemsize):
        apply_segment(segment, tensor[segment.place], itemsize)


def changed_segments(encoded: memoryview, nbytes: int, itemsize: int) -> list[Segment]:
    """The segments of a tensor of ``nbytes`` bytes, but for those in which nothing changed.

    Raises ValueError, with the segment, for bytes of which the first of a segment show that they are no encoding.
    """
    position, found = 0, []
    for number, place in enumerate(segments(nbytes)):
        with naming(number):
            end = position + _encoded_bytes(encoded[position:], place.stop - place.start, itemsize)
        if encoded[position] != _UNCHANGED:
            found.append(Segment(number, place, encoded[position:end]))
        position = end
    if position != encoded.nbytes:
        raise ValueError(f"{encoded.nbytes - position} bytes are left over after the last segment")
    return found


def apply_segment(segment: Segment, data: memoryview, itemsize: int) -> Array:
    """Make the old bytes of one segment, in ``data``, the new ones. Returns what the elements that were told became.

    Raises ValueError as ``apply``.
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
    """For who joins the planes otherwise: how many elements a segment that has its changes tells, and its planes.

    Those are bytes of as many elements, ``GAP_PLANES`` of gaps and then those of the differences in zigzag order;
    empty: zeros. Nothing says yet that the positions lie in the segment. Raises ValueError as ``apply``.
    """
    with naming(segment.number):
        return _inflated(segment.encoded, itemsize)


def new_bytes(segment: Segment) -> memoryview | None:
    """All of a segment's; None if it has its changes: ``decode_changes``."""
    return segment.encoded[1:] if segment.encoded[0] == _WHOLE else None


def decode_changes(segment: Segment, nbytes: int, itemsize: int) -> tuple[Array, Array]:
    """What ``encode_changes`` was given of a segment of ``nbytes`` bytes; differences as unsigned integers.

    Raises ValueError as ``apply``.
    """
    with naming(segment.number):
        return _decoded(segment.encoded, nbytes // itemsize, UNSIGNED[itemsize])


@contextmanager
def naming(segment: int) -> Iterator[None]:
    """What is wrong with its bytes is a ValueError that names the segment."""
    try:
        yield
    except (ValueError, zlib.error) as error:
        raise ValueError(f"segment {segment}: {error}") from error


def changed_elements(base: memoryview, new: memoryview, itemsize: int) -> tuple[Array, Array]:
    """Positions int64 and differences of the elements that differ, as ``encode_changes`` takes them."""
    # eight bytes at a time: few of these differ
    dtype = UNSIGNED[itemsize]
    old, now = np.frombuffer(base, dtype), np.frombuffer(new, dtype)
    shift = 3 - _SHIFTS[old.itemsize]
    whole = old.size >> shift << shift
    words_old, words_now = old[:whole].view("<u8"), now[:whole].view("<u8")
    words = np.flatnonzero(words_old != words_now)
    differences = words_now[words].view(old.dtype)
    differences -= words_old[words].view(old.dtype)
    inside = np.flatnonzero(differences != 0)  # of booleans: of integers numpy takes five times as long
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


def _encoded_bytes(encoded: memoryview, nbytes: int, itemsize: int) -> int:
    """Of the first segment in ``encoded``, which is one of ``nbytes`` bytes."""
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


def _decoded(encoded: memoryview, size: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Positions and differences in a changed segment of ``size`` elements, of which the header was checked."""
    count, planes = _inflated(encoded, dtype.itemsize)
    positions = _joined_planes(planes[:GAP_PLANES], count, np.dtype("<i8"))
    positions[1:] += 1
    np.cumsum(positions, out=positions)
    require_inside(int(positions[-1]), size)
    return positions, _unzigzag(_joined_planes(planes[GAP_PLANES:], count, dtype))


def require_inside(last: int, size: int) -> None:
    """Raises ValueError if the last position of a segment of ``size`` elements is not one of them."""
    if last >= size:
        raise ValueError(f"its last change is at element {last} of {size}")


def _inflated(encoded: memoryview, itemsize: int) -> tuple[int, list[bytes]]:
    """How many changes a segment has, and the planes of their numbers; empty: zeros.

    No plane is decompressed beyond as many bytes.
    """
    header = _header(itemsize)
    count, *lengths = map(int, header.unpack_from(encoded)[1:])
    planes, start = [], header.size
    for plane, length in enumerate(lengths):
        values = delta_planes.decoded(encoded[start : start + length], count) if length else b""
        if values is None:
            kind = plane if plane < GAP_PLANES else plane - GAP_PLANES
            raise ValueError(f"plane {kind} does not decode to {count} bytes and end there")
        planes.append(values)
        start += length
    return count, planes


def _joined_planes(planes: list[bytes], count: int, dtype: np.dtype[Any]) -> Array:
    """``count`` numbers out of their planes."""
    numbers = np.frombuffer(planes[0], np.uint8).astype(dtype) if planes[0] else np.zeros(count, dtype)
    of_each = numbers.view(np.uint8).reshape(-1, numbers.itemsize)
    for plane, values in enumerate(planes[1:], start=1):
        if values:
            of_each[:, plane] = np.frombuffer(values, np.uint8)
    return numbers
