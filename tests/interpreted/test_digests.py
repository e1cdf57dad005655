"""The kernel that hashes chunks on a GPU, against xxhash, bit for bit. Its speed is decided on a GPU."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.quant import digests
from rollout_service.quant.digests import DIGEST_BYTES, MIN_BYTES, Hashing, Run

CPU = torch.device("cpu")


def bytes_of(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))


def expected(memory: torch.Tensor, places: list[tuple[int, int]]) -> list[str]:
    return [xxhash.xxh3_128_hexdigest(memory.numpy()[start : start + nbytes]) for start, nbytes in places]


def found(memory: torch.Tensor, places: list[tuple[int, int]]) -> list[str]:
    runs = [Run(memory.data_ptr() + start, nbytes) for start, nbytes in places]
    held = [memory.numpy()[start : start + nbytes].data for start, nbytes in places]
    groups = [runs[:1], runs[1:], []]
    hashing = Hashing(groups, CPU)
    for number in reversed(range(len(groups))):
        hashing.queue(number)
    read = hashing.read(held.__getitem__)
    return [read[at : at + DIGEST_BYTES].hex() for at in range(0, len(read), DIGEST_BYTES)]


BOUNDARIES = (16, MIN_BYTES, 256, 1024, 1088, 2048, 8192, 9216)
"""Sizes from which on the kernel does something else."""


@pytest.mark.parametrize("nbytes", [0, *(size + more for size in BOUNDARIES for more in (-1, 0, 1)), 27_001, 70_001])
def test_of_one_run(nbytes):
    """The largest ones have several rounds of the kernel's loop. Those of whole chunks: tests/gpu/test_digests.py."""
    memory = bytes_of(nbytes + 8)
    for start in (0, 1, 4) if nbytes < 70_001 else (0,):
        assert found(memory, [(start, nbytes)]) == expected(memory, [(start, nbytes)])


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5000)), min_size=1, max_size=6))
def test_of_several_runs_wherever_they_lie(places):
    memory = bytes_of(6000, seed=len(places))
    assert found(memory, places) == expected(memory, places)


def test_runs_may_be_given_as_an_array():
    memory = bytes_of(9000)
    places = [(0, 5000), (5000, 17), (5001, 3000)]
    runs = np.array([(memory.data_ptr() + start, nbytes) for start, nbytes in places], np.int64)
    hashing = Hashing([runs[:2], runs[2:]], CPU)
    for number in (0, 1):
        hashing.queue(number)
    read = hashing.read(lambda number: memory.numpy()[places[number][0] :][: places[number][1]].data)
    assert read.hex() == "".join(expected(memory, places))


def test_extreme_bytes():
    for value in (0, 255):
        memory = torch.full((5000,), value, dtype=torch.uint8)
        assert found(memory, [(0, 5000)]) == expected(memory, [(0, 5000)])


def test_a_kernel_that_hashes_otherwise_is_found_out(monkeypatch):
    monkeypatch.setattr(digests, "_tried", set())
    monkeypatch.setattr(digests, "_AVALANCHE", digests._AVALANCHE + 2)
    with pytest.raises(RuntimeError, match="gives other digests than xxhash"):
        found(bytes_of(1000), [(0, 1000)])
