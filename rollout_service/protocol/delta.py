"""What changed in a tensor, as bytes: exactly the new tensor comes out of the old one and these. Needs numpy alone.

One step of an RL trainer changes few elements, most of them to the next larger or smaller number of their dtype. So
what is sent of a tensor are the gaps between the elements that changed, and by how much each did: the difference of the
old and the new bit pattern, integers of that size that wrap around; in zigzag order (0, -1, 1, -2, …), so that a small
step up or down is a small number.

Both are sequences of integers whose low bytes are spread out and whose high bytes are few values, most of them zero.
They are taken apart into planes, all lowest bytes, then all second bytes, and each plane is Huffman-coded by zlib
(deflate without matches: nothing repeats in it). Gaps between elements that change independently of each other are
distributed geometrically, which this codes within 1% of their entropy: Huffman's code of a geometric distribution is
Golomb's, and the low byte is close to uniform. If 0.3% change, most by one step, a change takes 11.5 bits, and its
entropy is 11.0; with matches deflate needs more bits, and up to ten times as long. A plane of which nearly all is zero
is run-length-coded, and one of zeros alone is left out.

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
from typing import Any

import numpy as np
import numpy.typing as npt

SEGMENT_BYTES = 8 << 20
"""A multiple of every element's size; positions in it fit into the planes of a gap."""

_Array = npt.NDArray[Any]

_UNCHANGED, _CHANGED, _WHOLE = range(3)
_GAP_PLANES = 3
_SPARSE = 0.25
"""Share of changed elements above which a segment is sent as a whole: its positions are most of its bytes then, and
zlib takes longer than a network."""
_RUNS = 0.9
"""Share of zeros above which runs of them are shorter than one bit each."""
_RAW_DEFLATE, _MEMORY_LEVEL = -15, 9
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


def segments(nbytes: int) -> Iterator[slice]:
    """The bytes of each segment of a tensor, in order."""
    for start in range(0, nbytes, SEGMENT_BYTES):
        yield slice(start, min(start + SEGMENT_BYTES, nbytes))


def encode_segment(base: memoryview, new: memoryview, itemsize: int) -> bytes:
    """What changed from ``base`` to ``new``: one segment of a tensor with elements of ``itemsize`` bytes."""
    dtype = _UNSIGNED[itemsize]
    old, now = np.frombuffer(base, dtype), np.frombuffer(new, dtype)
    positions = _changed(old, now)
    if not positions.size:
        return bytes([_UNCHANGED])
    if positions.size <= _SPARSE * now.size:
        gaps = np.diff(positions, prepend=-1) - 1
        planes = [*_planes(gaps, _GAP_PLANES), *_planes(_zigzag(now[positions] - old[positions]), itemsize)]
        encoded = _header(itemsize).pack(_CHANGED, positions.size, *map(len, planes)) + b"".join(planes)
        if len(encoded) < new.nbytes:
            return encoded
    return bytes([_WHOLE]) + bytes(new)


def encode(base: memoryview, new: memoryview, itemsize: int) -> bytes:
    """What changed in a whole tensor; empty if nothing did. Raises ValueError for tensors of different sizes."""
    if base.nbytes != new.nbytes:
        raise ValueError(f"a tensor of {base.nbytes} bytes does not become one of {new.nbytes}")
    return joined([encode_segment(base[part], new[part], itemsize) for part in segments(new.nbytes)])


def joined(encoded: list[bytes]) -> bytes:
    """A tensor out of its segments, in order; empty if nothing changed in any."""
    unchanged = bytes([_UNCHANGED])
    return b"" if all(segment == unchanged for segment in encoded) else b"".join(encoded)


def apply(encoded: memoryview, tensor: memoryview, itemsize: int) -> None:
    """Make the old bytes in ``tensor`` the new ones.

    Raises ValueError, with the segment, for bytes that are no encoding of a tensor of this size; the tensor is neither
    the old nor the new one then.
    """
    position = 0
    for number, part in enumerate(segments(tensor.nbytes)):
        try:
            position = _apply_segment(encoded, position, np.frombuffer(tensor[part], _UNSIGNED[itemsize]))
        except (ValueError, zlib.error) as error:
            raise ValueError(f"segment {number}: {error}") from error
    if position != encoded.nbytes:
        raise ValueError(f"{encoded.nbytes - position} bytes are left over after the last segment")


def _changed(old: _Array, now: _Array) -> npt.NDArray[np.int64]:
    """Indices of the elements that differ. Compares eight bytes at a time: few of these differ."""
    per_word = 8 // old.itemsize
    whole = old.size - old.size % per_word
    words_old, words_now = old[:whole].view("<u8"), now[:whole].view("<u8")
    words = np.flatnonzero(words_old != words_now)
    differs = (words_old[words] ^ words_now[words]).view(old.dtype)
    inside = np.flatnonzero(differs)
    rest = np.flatnonzero(old[whole:] != now[whole:])
    return np.concatenate([words[inside // per_word] * per_word + inside % per_word, rest + whole])


def _zigzag(difference: _Array) -> _Array:
    signed = difference.view(f"<i{difference.itemsize}")
    code: _Array = (signed << 1) ^ (signed >> (8 * signed.itemsize - 1))
    return code.view(difference.dtype)


def _unzigzag(code: _Array) -> _Array:
    one = code.dtype.type(1)
    difference: _Array = (code >> one) ^ (~(code & one) + one)
    return difference


def _planes(numbers: _Array, count: int) -> Iterator[bytes]:
    """The ``count`` lowest bytes of each number, the lowest of all first, compressed."""
    for plane in range(count):
        values = (numbers >> (8 * plane)).astype(np.uint8)
        nonzero = int(np.count_nonzero(values))
        if not nonzero:
            yield b""
            continue
        strategy = zlib.Z_RLE if nonzero < (1 - _RUNS) * values.size else zlib.Z_HUFFMAN_ONLY
        deflate = zlib.compressobj(6, zlib.DEFLATED, _RAW_DEFLATE, _MEMORY_LEVEL, strategy)
        yield deflate.compress(values.data) + deflate.flush()


def _header(itemsize: int) -> struct.Struct:
    return struct.Struct(f"<BI{_GAP_PLANES + itemsize}I")


def _apply_segment(encoded: memoryview, position: int, elements: _Array) -> int:
    """Where the next segment begins."""
    if position >= encoded.nbytes:
        raise ValueError("it is not there")
    kind = int(encoded[position])
    if kind == _UNCHANGED:
        return position + 1
    if kind == _WHOLE:
        data = encoded[position + 1 : position + 1 + elements.nbytes]
        if data.nbytes < elements.nbytes:
            raise ValueError(f"{data.nbytes} bytes of {elements.nbytes} are there")
        elements[:] = np.frombuffer(data, elements.dtype)
        return position + 1 + elements.nbytes
    if kind != _CHANGED:
        raise ValueError(f"it begins with {kind}, which is no kind of segment")
    header = _header(elements.itemsize)
    if position + header.size > encoded.nbytes:
        raise ValueError("it ends in its header")
    count, *lengths = map(int, header.unpack_from(encoded, position)[1:])
    if not 0 < count <= elements.size:
        raise ValueError(f"{count} changes in {elements.size} elements")
    start = position + header.size
    end = start + sum(lengths)
    if end > encoded.nbytes:
        raise ValueError(f"its planes have {end - start} bytes, and {encoded.nbytes - start} are there")
    gaps = _joined_planes(encoded[start:], lengths[:_GAP_PLANES], count, np.dtype("<i8"))
    positions = np.cumsum(gaps + 1) - 1
    if positions[-1] >= elements.size:
        raise ValueError(f"its last change is at element {positions[-1]} of {elements.size}")
    start += sum(lengths[:_GAP_PLANES])
    codes = _joined_planes(encoded[start:], lengths[_GAP_PLANES:], count, elements.dtype)
    elements[positions] += _unzigzag(codes)
    return end


def _joined_planes(encoded: memoryview, lengths: list[int], count: int, dtype: np.dtype[Any]) -> _Array:
    """``count`` numbers out of their planes. No plane is decompressed beyond ``count`` bytes."""
    numbers, start = np.zeros((count, dtype.itemsize), np.uint8), 0
    for plane, length in enumerate(lengths):
        if length:
            inflate = zlib.decompressobj(_RAW_DEFLATE)
            values = inflate.decompress(encoded[start : start + length], count + 1)
            if len(values) != count or not inflate.eof or inflate.unused_data:
                raise ValueError(f"plane {plane} does not decode to {count} bytes and end there")
            numbers[:, plane] = np.frombuffer(values, np.uint8)
        start += length
    return numbers.view(dtype).reshape(count)
