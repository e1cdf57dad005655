"""Differences of many pairs of runs of numbers on a GPU, and how many are not zero, in a few kernel launches."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from rollout_service.gpu_streams import on_device, queued_to
from rollout_service.grouped_copy import numbered

TILE_BYTES = 16 << 10
"""What one program of the kernel subtracts at most."""
_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32}
"""Of numbers, by their bytes."""
_ALIGNED_BYTES = 16


class Pair(NamedTuple):
    """Runs of ``nbytes`` at two addresses, which are multiples of a number's size."""

    new: int
    old: int
    nbytes: int
    itemsize: int
    counter: int
    """Where its differences are counted: pairs may share one."""


def subtract_in_place(pairs: Sequence[Pair], counters: int, device: torch.device) -> torch.Tensor:
    """Queue on the current stream ``old = new - old``, bit patterns as integers that wrap around.

    Returns int32 [counters] there: of each, the differences that are not zero. ``device``: in Triton's interpreter the
    CPU. The memory must stay what it is until the stream has come so far. Raises ``torch.cuda.OutOfMemoryError``.
    """
    found = torch.zeros(counters, dtype=torch.int32, device=device)
    tiles = _tiles(pairs)
    with on_device(device):
        for itemsize, dtype in _TYPES.items():
            of_size = tiles[tiles[:, 4] == itemsize]
            is_aligned = np.bitwise_or.reduce(of_size[:, :3], axis=1) % _ALIGNED_BYTES == 0
            for aligned in (True, False):
                table = np.ascontiguousarray(of_size[is_aligned == aligned, :4])
                if not len(table):
                    continue
                table[:, 2] //= itemsize
                subtract_tiles[(len(table),)](
                    queued_to(device, torch.from_numpy(table)), found,
                    DTYPE=dtype, ALIGNED=_ALIGNED_BYTES // itemsize if aligned else 0, TILE=TILE_BYTES // itemsize,
                    num_warps=8,
                )  # fmt: skip
    return found


def _tiles(pairs: Sequence[Pair]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[tiles, 5]: both addresses, bytes, counter and bytes of a number."""
    table = np.array(pairs, np.int64).reshape(-1, 5)
    pair, number = numbered(-(-table[:, 2] // TILE_BYTES))
    start = number * TILE_BYTES
    new, old, nbytes, itemsize, counter = table[pair].T
    return np.stack([new + start, old + start, np.minimum(TILE_BYTES, nbytes - start), counter, itemsize], axis=1)


@triton.jit(do_not_specialize_on_alignment=["table", "counts"])
def subtract_tiles(table, counts, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """One tile a program; ``table`` int64 [tiles, 4]: addresses of new and old numbers, how many, and their count's
    place in ``counts``, int32.

    ``ALIGNED``: addresses are multiples of 16 bytes, and sizes of so many numbers; 0: they may be any.
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
