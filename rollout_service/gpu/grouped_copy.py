"""Many copies between fixed addresses in a few kernel launches.

A mixture of experts has tens of thousands of tensors: copied one by one, their launches take longer than the copies.
The source may be pinned host memory, which a GPU reads by its address.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from rollout_service.gpu.streams import queued_to

TILE_BYTES = 32 << 10
"""Maximum size in bytes that one program of the kernel copies."""
_WIDTHS = {16: tl.int64, 4: tl.int32, 1: tl.int8}
"""Alignment in bytes of addresses and sizes → the type to copy in; 16: two ``int64`` a load."""


Integers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """``rows`` ranges of ``row_bytes`` each, from ``source`` to ``target`` addresses, each with its stride."""

    source: int
    target: int
    row_bytes: int
    rows: int = 1
    source_stride_bytes: int = 0
    target_stride_bytes: int = 0


@triton.jit
def copy_tiles(table, DTYPE: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr):
    """Copy one tile per program; ``table`` int64 [tiles, 3]: source and target addresses, and number of ``DTYPE``
    elements.

    ``PAIRS``: addresses and sizes are multiples of two elements.
    """
    entry = table + 3 * tl.program_id(0).to(tl.int64)
    source = tl.load(entry).to(tl.pointer_type(DTYPE))
    target = tl.load(entry + 1).to(tl.pointer_type(DTYPE))
    size = tl.load(entry + 2)
    if PAIRS:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        size = tl.multiple_of(size, 2)
    element = tl.arange(0, TILE)
    inside = element < size
    tl.store(target + element, tl.load(source + element, mask=inside), mask=inside)


class GroupedCopy:
    """Copies between fixed storage, repeatedly. The caller keeps the storage alive.

    The table of addresses is queued on the current stream: run it there, or on a stream that has waited for it.
    """

    def __init__(self, copies: Iterable[Rows] | Integers, device: torch.device) -> None:
        """``copies``: rows, or int64 [copies, 3]: source address, target address and size in bytes."""
        tiles = _tiles(copies)
        aligned = np.bitwise_or.reduce(tiles, axis=1)
        width = np.select([aligned % 16 == 0, aligned % 4 == 0], [16, 4], 1)
        self._launches = []
        for nbytes, dtype in _WIDTHS.items():
            table = tiles[width == nbytes]
            if len(table):
                element_bytes = min(nbytes, 8)
                table[:, 2] //= element_bytes
                self._launches.append((queued_to(device, torch.from_numpy(table)), dtype, element_bytes))

    def run(self) -> None:
        """Queue the kernels on the current stream."""
        for table, dtype, element_bytes in self._launches:
            copy_tiles[(len(table),)](
                table, DTYPE=dtype, PAIRS=element_bytes == 8, TILE=TILE_BYTES // element_bytes, num_warps=8
            )


def _tiles(copies: Iterable[Rows] | Integers) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return [tiles, 3]: source, target, size in bytes. Vectorized over tens of thousands of copies."""
    if isinstance(copies, np.ndarray):
        return _split_into_tiles(*copies.T)
    table = np.array(
        [(c.source, c.target, c.row_bytes, c.rows, c.source_stride_bytes, c.target_stride_bytes) for c in copies],
        np.int64,
    ).reshape(-1, 6)
    copy, row = numbered(table[:, 3])
    source, target, row_bytes, _, source_stride, target_stride = table[copy].T
    return _split_into_tiles(source + row * source_stride, target + row * target_stride, row_bytes)


def _split_into_tiles(
    source: Integers, target: Integers, nbytes: Integers
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    of_run, number = numbered(-(-nbytes // TILE_BYTES))
    start = number * TILE_BYTES
    return np.stack(
        [source[of_run] + start, target[of_run] + start, np.minimum(TILE_BYTES, nbytes[of_run] - start)], axis=1
    )


def numbered(
    counts: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Expand counts per kind: return the kind of each item, and its index within the kind."""
    kinds = np.repeat(np.arange(len(counts)), counts)
    return kinds, np.arange(len(kinds)) - np.repeat(np.cumsum(counts) - counts, counts)
