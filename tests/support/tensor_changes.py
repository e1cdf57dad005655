"""Changes of one tensor, of which a delta consists: what they are made of, sound or not."""

import struct

import numpy as np
import numpy.typing as npt
import zstandard

from rollout_service.protocol.delta import encode_segment, joined, segments

Bits = npt.NDArray[np.unsignedinteger]
ITEMSIZES = [1, 2, 4]
HEADER = struct.Struct("<BI4I")
"""Of a changed segment of bytes."""


def random_bits(size: int, itemsize: int, seed: int = 0) -> Bits:
    dtype = np.dtype(f"<u{itemsize}")
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)


def stepped(old: Bits, share: float, seed: int = 1) -> Bits:
    """A share of the elements one step up or down, and some of these by any step."""
    rng = np.random.default_rng(seed)
    new, at = old.copy(), np.flatnonzero(rng.random(old.size) < share)
    steps = np.where(rng.random(at.size) < 0.9, rng.choice([-1, 1], at.size), rng.integers(-(2**31), 2**31, at.size))
    new[at] += steps.astype(np.int64).astype(old.dtype)
    return new


def bytes_of(bits: Bits) -> memoryview:
    return bits.view(np.uint8).data


def encode(base: memoryview, new: memoryview, itemsize: int) -> bytes:
    """The changes of a whole tensor; empty if there are none."""
    return joined([encode_segment(base[part], new[part], itemsize) for part in segments(new.nbytes)])


def frame(values: bytes) -> bytes:
    """A plane, as zstd writes one that does not tell its size."""
    return zstandard.ZstdCompressor(1, write_content_size=False).compress(values)


def segment(count: int, *planes: bytes, lengths: list[int] | None = None) -> bytes:
    """A changed segment of bytes, sound or not."""
    return HEADER.pack(1, count, *(lengths or map(len, planes))) + b"".join(planes)
