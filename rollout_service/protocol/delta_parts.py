"""The parts of a delta: which tensors each is about, and what it says of them. Needs numpy alone.

Which tensors a part is about follows from the sizes of all of them, so both ends know it, and how many parts there are,
before anything is compared: consecutive tensors that have ``_bytes_of_a_part`` together, or a single larger one. A
part is sent as soon as the trainer has compared its tensors, and the ingest makes them while it compares the next.

A part describes itself. Little-endian:

    first tensor uint32, tensors uint32
    of each tensor the bytes of its changes, uint64; 0: it is what it was
    of each changed tensor the digest that it must have, 16 bytes, as ``StoredTensor.digest``
    the changes of each (see ``delta.py``), one after the other
"""

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

PARTS = 16
"""Of most deltas: so that tensors are made while others are compared."""
LEAST_TENSOR_BYTES, MOST_TENSOR_BYTES = 1 << 20, 2 << 30
"""Of the tensors that a part is about, a single larger one left aside: a request takes a millisecond, and after a step
of a trainer 2% of the bytes are sent at most, which have to be in memory at once."""

_HEADER = struct.Struct("<II")
_SIZE = np.dtype("<u8")
_DIGEST_BYTES = 16


class TensorChange(NamedTuple):
    """What a part says of one tensor that has changed."""

    nbytes: int
    """Of its changes, at least one."""
    digest: str
    """That of the result, as ``StoredTensor.digest``."""


class PartHeader(NamedTuple):
    """What a part begins with."""

    changes: tuple[TensorChange | None, ...]
    """Of each of its tensors, in order; None: it is what it was."""
    starts: tuple[int, ...]
    """Where the changes of each begin in the part."""


def tensors_of_parts(sizes: Sequence[int]) -> tuple[range, ...]:
    """The tensors that each part is about, by their places in the table. ``sizes``: bytes of all tensors."""
    most, parts = _bytes_of_a_part(sum(sizes)), []
    first = nbytes = 0
    for number, size in enumerate(sizes):
        if number > first and nbytes + size > most:
            parts.append(range(first, number))
            first, nbytes = number, 0
        nbytes += size
    return (*parts, range(first, len(sizes))) if sizes else ()


def _bytes_of_a_part(nbytes: int) -> int:
    return min(max(LEAST_TENSOR_BYTES, -(-nbytes // PARTS)), MOST_TENSOR_BYTES)


def encode_header(first: int, changes: Sequence[TensorChange | None]) -> bytes:
    """What a part about ``changes``, of the tensors from ``first`` on, begins with."""
    sizes = np.array([0 if change is None else change.nbytes for change in changes], _SIZE)
    digests = "".join(change.digest for change in changes if change is not None)
    return _HEADER.pack(first, len(changes)) + sizes.tobytes() + bytes.fromhex(digests)


def most_header_bytes(count: int) -> int:
    """That the header of a part about so many tensors has."""
    return _HEADER.size + count * (_SIZE.itemsize + _DIGEST_BYTES)


def most_bytes(sizes: Sequence[int]) -> int:
    """That a part about tensors of these sizes may have."""
    return most_header_bytes(len(sizes)) + sum(map(_most_change_bytes, sizes))


def decode_header(begin: memoryview, part_bytes: int, tensors: range, sizes: Sequence[int]) -> PartHeader:
    """The header of a whole part.

    Args:
        begin: the part's first bytes, ``most_header_bytes`` or all that there are.
        part_bytes: that the part has.
        tensors: that it is to be about, by their places in the table.
        sizes: bytes of each of these.

    Raises ValueError for another part, or for bytes that are none.
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
        if nbytes > _most_change_bytes(size):
            raise ValueError(f"tensor number {number} has {nbytes} bytes of changes, more than its own {size}")
    digests = iter(bytes(begin[at : at + _DIGEST_BYTES]).hex() for at in range(first_digest, end, _DIGEST_BYTES))
    changes = tuple(TensorChange(nbytes, next(digests)) if nbytes else None for nbytes in told)
    return PartHeader(changes, tuple(accumulate(told, initial=end))[:-1])


def _most_change_bytes(tensor_bytes: int) -> int:
    # what is larger as changes is written whole, after a byte for each segment
    return tensor_bytes + tensor_bytes // 1024 + 1
