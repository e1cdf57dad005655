"""Parts of a delta upload: which tensors each covers, and its binary format. Needs only numpy.

The sizes of all tensors decide how many parts there are and which tensors each covers. Both ends can compute this
before anything is compared. A part covers consecutive tensors of ``_bytes_of_a_part`` bytes together, or a single
larger tensor. The trainer sends a part once it has compared the part's tensors. The ingest applies it while the trainer
compares the next ones.

A part describes itself. Format, little-endian:

    first tensor uint32, tensors uint32
    bytes of the changes of each tensor, uint64; 0: unchanged
    digest of each changed tensor after the change, 16 bytes, as ``StoredTensor.digest``
    the changes of each (see ``delta.py``), one after the other
"""

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

PARTS = 16
"""The usual number of parts of a delta. Several parts let the ingest apply one while the trainer compares the next."""
LEAST_TENSOR_BYTES, MAX_TENSOR_BYTES = 1 << 20, 2 << 30
"""Minimum and maximum bytes of the tensors that a part covers; a single tensor may be larger. A request takes a
millisecond. After a training step at most 2% of these bytes are sent, and must be in memory at once."""

_HEADER = struct.Struct("<II")
_SIZE = np.dtype("<u8")
_DIGEST_BYTES = 16


class TensorChange(NamedTuple):
    """The size and resulting digest of one changed tensor in a part."""

    nbytes: int
    """Size of its changes in bytes, at least 1."""
    digest: str
    """Digest of the tensor after the change, as ``StoredTensor.digest``."""


class PartHeader(NamedTuple):
    """The decoded header of a part."""

    changes: tuple[TensorChange | None, ...]
    """One entry per tensor of the part, in order; None: unchanged."""
    starts: tuple[int, ...]
    """Offset in the part at which each tensor's changes begin."""


def tensors_of_parts(sizes: Sequence[int]) -> tuple[range, ...]:
    """Return the tensors that each part covers, as ranges of places in the table. ``sizes``: bytes of all tensors."""
    most, parts = _bytes_of_a_part(sum(sizes)), []
    first = nbytes = 0
    for number, size in enumerate(sizes):
        if number > first and nbytes + size > most:
            parts.append(range(first, number))
            first, nbytes = number, 0
        nbytes += size
    return (*parts, range(first, len(sizes))) if sizes else ()


def _bytes_of_a_part(nbytes: int) -> int:
    return min(max(LEAST_TENSOR_BYTES, -(-nbytes // PARTS)), MAX_TENSOR_BYTES)


def encode_header(first: int, changes: Sequence[TensorChange | None]) -> bytes:
    """Encode the header of a part that has ``changes`` of the tensors from number ``first`` on."""
    sizes = np.array([0 if change is None else change.nbytes for change in changes], _SIZE)
    digests = "".join(change.digest for change in changes if change is not None)
    return _HEADER.pack(first, len(changes)) + sizes.tobytes() + bytes.fromhex(digests)


def most_header_bytes(count: int) -> int:
    """Return the maximum header size in bytes of a part with ``count`` tensors."""
    return _HEADER.size + count * (_SIZE.itemsize + _DIGEST_BYTES)


def most_bytes(sizes: Sequence[int]) -> int:
    """Return the maximum size in bytes of a part whose tensors have these sizes."""
    return most_header_bytes(len(sizes)) + sum(map(_max_change_bytes, sizes))


def decode_header(begin: memoryview, part_bytes: int, tensors: range, sizes: Sequence[int]) -> PartHeader:
    """Decode and check the header of a complete part.

    Args:
        begin: the first bytes of the part: ``most_header_bytes``, or all if it has fewer.
        part_bytes: size of the part.
        tensors: the tensors that the part must cover, by their places in the table.
        sizes: size in bytes of each of these tensors.

    Raises ValueError if the part covers other tensors or its header is invalid.
    """
    if begin.nbytes < _HEADER.size:
        raise ValueError(f"it has {begin.nbytes} bytes, fewer than its header")
    first, count = _HEADER.unpack_from(begin)
    if range(first, first + count) != tensors:
        raise ValueError(
            f"it is about {count} tensors from number {first} on, and is to be about {len(tensors)} from number "
            f"{tensors.start} on"
        )
    end = _HEADER.size + count * _SIZE.itemsize
    if begin.nbytes < end:
        raise ValueError(f"it has {begin.nbytes} bytes, fewer than its header")
    told: list[int] = np.frombuffer(begin, _SIZE, count, _HEADER.size).tolist()
    first_digest, end = end, end + _DIGEST_BYTES * sum(nbytes > 0 for nbytes in told)
    if part_bytes != end + sum(told) or begin.nbytes < end:
        raise ValueError(f"it has {part_bytes} bytes, and by its header {end + sum(told)}")
    for number, nbytes, size in zip(tensors, told, sizes, strict=True):
        if nbytes > _max_change_bytes(size):
            raise ValueError(f"tensor number {number} has {nbytes} bytes of changes, more than its own {size}")
    digests = iter(bytes(begin[at : at + _DIGEST_BYTES]).hex() for at in range(first_digest, end, _DIGEST_BYTES))
    changes = tuple(TensorChange(nbytes, next(digests)) if nbytes else None for nbytes in told)
    return PartHeader(changes, tuple(accumulate(told, initial=end))[:-1])


def _max_change_bytes(tensor_bytes: int) -> int:
    # larger changes are not sent: the tensor is then encoded whole, plus one byte for each segment
    return tensor_bytes + tensor_bytes // 1024 + 1
