"""Subtract many pairs of number ranges on a GPU, and count and list the nonzero differences, in a few kernel
launches."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from rollout_service.gpu.grouped_copy import numbered
from rollout_service.gpu.streams import on_device, queued_to

TILE_BYTES = 16 << 10
"""Maximum size in bytes that one program of the kernel subtracts."""
_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32}
"""Integer types by their size in bytes."""
_ALIGNED_BYTES = 16
_CHANGES = 1024
"""Number of changes that one program encodes."""
_Integers = npt.NDArray[np.int64]


class Pair(NamedTuple):
    """Ranges of ``nbytes`` at two addresses, which are multiples of the element size."""

    new: int
    old: int
    nbytes: int
    itemsize: int
    counter: int
    """Index of the counter of its differences; pairs may share one."""


def subtract_in_place(pairs: Sequence[Pair], counters: int, device: torch.device) -> torch.Tensor:
    """Queue on the current stream ``old = new - old``, bit patterns as integers that wrap around.

    Return int32 [counters] on the device: the number of nonzero differences of each. ``device``: the CPU in Triton's
    interpreter. The memory must not change until the stream has processed it. Raises ``torch.cuda.OutOfMemoryError``.
    """
    found = torch.zeros(counters, dtype=torch.int32, device=device)
    table = np.array(pairs, np.int64).reshape(-1, 5)
    new, old, nbytes, itemsizes, _ = table.T
    in_aligned = np.where((new | old) % _ALIGNED_BYTES == 0, nbytes // _ALIGNED_BYTES * _ALIGNED_BYTES, 0)
    with on_device(device):
        for aligned, begin, length in ((True, 0 * nbytes, in_aligned), (False, in_aligned, nbytes - in_aligned)):
            for itemsize, dtype in _TYPES.items():
                some = (itemsizes == itemsize) & (length > 0)
                if not some.any():
                    continue
                tiles = _tiles(table[some], begin[some], length[some], itemsize)
                subtract_tiles[(len(tiles),)](
                    queued_to(device, torch.from_numpy(tiles)), found,
                    DTYPE=dtype, ALIGNED=_ALIGNED_BYTES // itemsize if aligned else 0, TILE=TILE_BYTES // itemsize,
                    num_warps=8,
                )  # fmt: skip
    return found


def _tiles(pairs: _Integers, begin: _Integers, nbytes: _Integers, itemsize: int) -> _Integers:
    """Return [tiles, 4]: both addresses, number of elements, and counter, for pairs [pairs, 5], as ``Pair``. Covers
    ``nbytes`` from ``begin`` on, as elements of ``itemsize`` bytes."""
    counts = -(-nbytes // TILE_BYTES)
    _, number = numbered(counts)
    start, tile = number * TILE_BYTES, TILE_BYTES // itemsize
    tiles = np.empty((len(number), 4), np.int64)
    # column by column: thousands of rows would take ten times as long, while the GPU is idle
    np.add(np.repeat(pairs[:, 0] + begin, counts), start, out=tiles[:, 0])
    np.add(np.repeat(pairs[:, 1] + begin, counts), start, out=tiles[:, 1])
    np.minimum(np.repeat(nbytes // itemsize, counts) - number * tile, tile, out=tiles[:, 2])
    tiles[:, 3] = np.repeat(pairs[:, 4], counts)
    return tiles


@triton.jit(do_not_specialize_on_alignment=["table", "counts"])
def subtract_tiles(table, counts, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Subtract one tile per program; ``table`` int64 [tiles, 4]: addresses of new and old numbers, number of elements,
    and index of their counter in ``counts``, int32.

    ``ALIGNED``: addresses are multiples of 16 bytes, and sizes multiples of this number of elements; 0: unaligned.
    """
    entry = table + 4 * tl.program_id(0).to(tl.int64)
    new = tl.load(entry).to(tl.pointer_type(DTYPE))
    old = tl.load(entry + 1).to(tl.pointer_type(DTYPE))
    size = tl.load(entry + 2)
    if ALIGNED:
        new = tl.multiple_of(new, 16)
        old = tl.multiple_of(old, 16)
        size = tl.multiple_of(size, ALIGNED)
    element = tl.arange(0, TILE)
    inside = element < size
    difference = tl.load(new + element, mask=inside, other=0) - tl.load(old + element, mask=inside, other=0)
    tl.store(old + element, difference, mask=inside)
    tl.atomic_add(counts + tl.load(entry + 3), tl.sum((difference != 0).to(tl.int32), 0))


def changes_of(differences: torch.Tensor, count: int, gap_planes: int) -> torch.Tensor:
    """Queue on the current stream the encoding of the ``count`` nonzero numbers, at least one.

    Return uint8 [4 + size + ``gap_planes`` + size, count] on the device, where size is the element size in bytes. It
    contains, one after the other: the positions, int32 [count], ascending; the numbers [count]; a row for each of the
    lowest bytes of the gaps, the number of zeros before each number since the last (undefined for the first); and a row
    for each byte of the numbers in zigzag order, 0, -1, 1, -2, ….

    ``differences``: signed [N], at most 4 bytes each. Raises ``torch.cuda.OutOfMemoryError``.
    """
    places, itemsize = torch.nonzero_static(differences, size=count), differences.element_size()
    rows = torch.empty((4 + itemsize + gap_planes + itemsize, count), dtype=torch.uint8, device=differences.device)
    with on_device(differences.device):
        encode_changes[(triton.cdiv(count, _CHANGES),)](
            differences, places, rows.data_ptr(), count,
            DTYPE=_TYPES[itemsize], ITEMSIZE=itemsize, GAP_PLANES=gap_planes, CHANGES=_CHANGES,
        )  # fmt: skip
    return rows


@triton.jit(do_not_specialize=["rows", "count"], do_not_specialize_on_alignment=["differences"])
def encode_changes(
    differences, places, rows, count,
    DTYPE: tl.constexpr, ITEMSIZE: tl.constexpr, GAP_PLANES: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Encode ``CHANGES`` numbers per program. ``rows``: address of the result of ``changes_of``. ``places`` int64
    [count]."""
    index = tl.program_id(0).to(tl.int64) * CHANGES + tl.arange(0, CHANGES)
    inside = index < count
    place = tl.load(places + index, mask=inside, other=0)
    before = tl.load(places + index - 1, mask=inside & (index > 0), other=-1)
    number = tl.load(differences + place, mask=inside, other=0)
    address = rows + index * 4
    tl.store(address.to(tl.pointer_type(tl.int32)), place.to(tl.int32), mask=inside)
    address = rows + count * 4 + index * ITEMSIZE
    tl.store(address.to(tl.pointer_type(DTYPE)), number, mask=inside)
    gap = place - before - 1
    wide = number.to(tl.int32)
    zigzag = (wide << 1) ^ (wide >> 31)
    address = rows + count.to(tl.int64) * (4 + ITEMSIZE) + index
    for plane in tl.static_range(GAP_PLANES):
        tl.store(address.to(tl.pointer_type(tl.uint8)), (gap >> (8 * plane)).to(tl.uint8), mask=inside)
        address += count
    for plane in tl.static_range(ITEMSIZE):
        tl.store(address.to(tl.pointer_type(tl.uint8)), (zigzag >> (8 * plane)).to(tl.uint8), mask=inside)
        address += count
