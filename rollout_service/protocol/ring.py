"""A ring buffer's allocator: batches of tensors that are filled and given back in the same order."""

from collections import deque

ALIGNMENT_BYTES = 64
"""Alignment in bytes that suits tensors of any dtype."""


def aligned(nbytes: int) -> int:
    """Round up to a multiple of 64."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Ring:
    """Allocates ranges of ``nbytes`` as a ring: batches are given back in the order in which they were taken."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a new range; None while there is no room for it. Raises ValueError if it can never
        fit."""
        size = aligned(max(nbytes, 1))
        if size > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit into {self.nbytes}")
        start = self._free_start(size)
        if start is not None:
            self._taken.append((start, start + size))
        return start

    def _free_start(self, size: int) -> int | None:
        if not self._taken:
            return 0
        oldest, newest_end = self._taken[0][0], self._taken[-1][1]
        if newest_end <= oldest:  # wrapped around: the free space is between newest and oldest
            return newest_end if newest_end + size <= oldest else None
        if newest_end + size <= self.nbytes:
            return newest_end
        return 0 if size <= oldest else None

    def give_back(self, batches: int) -> None:
        """Free the oldest batches."""
        for _ in range(batches):
            self._taken.popleft()
