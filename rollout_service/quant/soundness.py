"""Check the numbers of many tensors on a GPU, with one kernel launch for each element size.

Valid numbers are described by their bits, which are compared as integers: for one sign, numbers of all these dtypes are
in the order of their bits. ``Converter.convert`` then finds the invalid number and the reason, by checking each tensor
separately.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from rollout_service.gpu.grouped_copy import numbered
from rollout_service.gpu.streams import on_device, queued_to

_TILE_BYTES = 16 << 10
"""Maximum size in bytes that one program of the kernel checks."""
_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32}
_ALIGNED_BYTES = 16


class Allowed(NamedTuple):
    """Valid elements x, as signed integers: ``minimum <= x & mask <= maximum``, and ``x & zero_bits == 0``."""

    itemsize: int
    mask: int
    minimum: int
    maximum: int
    zero_bits: int = 0


FINITE_WEIGHTS = {
    "bfloat16": Allowed(2, 0x7FFF, 0, 0x7F7F),
    "float16": Allowed(2, 0x7FFF, 0, 0x7BFF),
    "float32": Allowed(4, 0x7FFFFFFF, 0, 0x7F7F7FFF),  # larger values become infinity when rounded to BF16
}
"""Weights, by dtype, that are finite after rounding to BF16."""
CODES = {"float8_e4m3fn": Allowed(1, 0x7F, 0, 0x7E), "int8": Allowed(1, -1, -127, 127)}
"""Codes, by dtype, that a quantizer makes; without E4M3's NaN, and without INT8's -128, which is not symmetric."""
FINITE_SCALES = Allowed(4, -1, 0, 0x7F7FFFFF)
"""fp32 scales of a quantizer: they are not finite if the weights are not."""


def scales(largest: float, *, power_of_two: bool) -> Allowed:
    """Return the conditions for fp32 scales: normal, positive and at most ``largest``."""
    smallest = torch.finfo(torch.float32).tiny
    minimum, maximum = np.array([smallest, largest], np.float32).view(np.int32).tolist()
    return Allowed(4, -1, minimum, maximum, 0x7FFFFF if power_of_two else 0)


class Numbers(NamedTuple):
    """A range of numbers to be checked."""

    address: int
    elements: int
    allowed: Allowed


def table_of(numbers: Sequence[Numbers]) -> npt.NDArray[np.int64]:
    """Return the table for ``are_allowed``, [N, 7]: address, number of elements, and the fields of ``Allowed``."""
    return np.array([(address, elements, *allowed) for address, elements, allowed in numbers], np.int64).reshape(-1, 7)


def are_allowed(table: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Check all numbers of a table: bool [] on ``device``, computed by the current stream.

    ``device``: the CPU in Triton's interpreter.
    """
    found = torch.zeros(1, dtype=torch.int32, device=device)
    tiles = _tiles(table)
    for itemsize, dtype in _TYPES.items():
        for is_aligned in (True, False):
            chosen = (tiles[:, 2] == itemsize) & ((tiles[:, 0] % _ALIGNED_BYTES == 0) == is_aligned)
            if chosen.any():
                rows = queued_to(device, torch.from_numpy(tiles[chosen]))
                with on_device(device):
                    find_invalid[(len(rows),)](
                        rows, found, DTYPE=dtype, ALIGNED=is_aligned, TILE=_TILE_BYTES // itemsize
                    )
    return found[0] == 0


def _tiles(table: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    address, count, itemsize = table[:, 0], table[:, 1], table[:, 2]
    entry, number = numbered(-(-count * itemsize // _TILE_BYTES))
    tiles = table[entry]
    tiles[:, 0] = address[entry] + number * _TILE_BYTES
    per_tile = _TILE_BYTES // itemsize[entry]
    tiles[:, 1] = np.minimum(per_tile, count[entry] - number * per_tile)
    return tiles


@triton.jit
def find_invalid(table, found, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Set ``found`` int32 [1] to 1 if any number is invalid. One tile per program; ``table`` as of ``table_of``.

    ``ALIGNED``: every address is a multiple of 16.
    """
    entry = table + 7 * tl.program_id(0).to(tl.int64)
    numbers = tl.load(entry).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        numbers = tl.multiple_of(numbers, 16)
    count = tl.load(entry + 1)
    mask = tl.load(entry + 3).to(tl.int32)
    minimum = tl.load(entry + 4).to(tl.int32)
    maximum = tl.load(entry + 5).to(tl.int32)
    zero_bits = tl.load(entry + 6).to(tl.int32)
    element = tl.arange(0, TILE)
    inside = element < count
    bits = tl.load(numbers + element, mask=inside, other=0).to(tl.int32)
    compared = bits & mask
    is_invalid = inside & ((compared < minimum) | (compared > maximum) | ((bits & zero_bits) != 0))
    if tl.max(is_invalid.to(tl.int32), 0) > 0:
        tl.store(found, 1)
