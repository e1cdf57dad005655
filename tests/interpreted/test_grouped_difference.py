"""Differences of many runs at once, by the kernel in Triton's interpreter, against numpy's."""

import numpy as np
import pytest
import torch

from rollout_service.gpu import grouped_difference
from rollout_service.gpu.grouped_difference import Pair, subtract_in_place

SIZES = [1, 3, 16, 4096, 16_384, 16_385, 40_000]


@pytest.mark.parametrize("skipped", [0, 1], ids=["aligned", "not aligned"])
def test_it_is_the_difference_that_wraps_around_and_is_counted(skipped, monkeypatch):
    monkeypatch.setattr(grouped_difference, "TILE_BYTES", 4096)
    generator = np.random.default_rng(0)
    pairs, expected, counts, kept = [], [], [0] * 4, []  # addresses keep nothing alive
    for number, itemsize in enumerate((1, 2, 4, 2)):
        for size in SIZES:
            old = generator.integers(0, 256, (size + 16) * itemsize, np.uint8).view(f"i{itemsize}")
            new = old.copy()
            hit = generator.random(new.size) < 0.1
            new[hit] = generator.integers(0, 256, new.nbytes, np.uint8).view(new.dtype)[hit]
            first = -(old.ctypes.data // itemsize) % (16 // itemsize) + skipped
            kept.append(new)
            there_new, there_old = new[first : first + size], old[first : first + size]
            difference = (there_new - there_old).copy()
            counts[number] += int(np.count_nonzero(difference))
            edges = old[:first].copy(), old[first + size :].copy()
            expected.append((old, np.concatenate([edges[0], difference, edges[1]])))
            address = there_new.ctypes.data, there_old.ctypes.data
            pairs.append(Pair(*address, there_old.nbytes, itemsize, number))
    found = subtract_in_place(pairs, 5, torch.device("cpu"))
    assert found.tolist() == [*counts, 0] and all(counts)
    for old, became in expected:
        np.testing.assert_array_equal(old, became)


def test_nothing_to_subtract():
    assert subtract_in_place([], 2, torch.device("cpu")).tolist() == [0, 0]
