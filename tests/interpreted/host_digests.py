"""The kernel of ``quant/digests.py`` in numpy, which takes a fraction of the time of Triton's interpreter.

For tests of what is hashed and where. The kernel itself: test_digests.py.
"""

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from rollout_service.quant.digests import Words


class AddUp:
    """In place of the kernel ``add_up``."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(runs: torch.Tensor, words: torch.Tensor, sums: torch.Tensor, *, ALIGNED: bool, **_: int) -> None:
            assert grid == (len(runs),)
            for address, nbytes, row in runs.tolist():
                assert not (ALIGNED and address % 8)
                data = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
                sums[row] = torch.from_numpy(_sums_of(data, words.numpy().view(np.uint64)).view(np.int64))

        return launch


def _sums_of(data: np.ndarray[tuple[int], np.dtype[np.uint8]], words: Words) -> Words:
    keys = np.stack([words[stripe : stripe + 8] for stripe in range(16)])
    blocks = (len(data) - 1) // 1024
    rest = (len(data) - 1 - blocks * 1024) // 64
    stripes = np.frombuffer(data[: blocks * 1024 + rest * 64].tobytes(), np.uint64).reshape(-1, 8)
    found = words[32:40].copy()
    for block in range(blocks):
        found += _contribution(stripes[16 * block : 16 * block + 16], keys).sum(0)
        found = (found ^ (found >> np.uint64(47)) ^ words[16:24]) * np.uint64(0x9E3779B1)
    found += _contribution(stripes[16 * blocks :], keys[:rest]).sum(0)
    return found + _contribution(np.frombuffer(data[-64:].tobytes(), np.uint64), words[24:32])


def _contribution(stripes: Words, keys: Words) -> Words:
    """Return what stripes add to the sums, uint64 of the shape of ``stripes``."""
    keyed, swapped = stripes ^ keys, stripes[..., np.arange(8) ^ 1]
    product: Words = (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32)) + swapped
    return product
