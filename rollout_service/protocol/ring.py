"""Which ranges of a memory are taken, by batches of tensors that are filled and given back in one order."""

from collections import deque

ALIGNMENT_BYTES = 64
"""Tensors of any dtype may begin at its multiples."""


def aligned(nbytes: int) -> int:
    """The next multiple of 64."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Ring:
    """Which ranges of ``nbytes`` are taken: batches, one after the other, given back in their order."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> int | None:
        """The first byte of a range; None while there is no room for it. Raises ValueError if there never is."""
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
        if newest_end <= oldest:  # it has wrapped around: what is free lies between
            return newest_end if newest_end + size <= oldest else None
        if newest_end + size <= self.nbytes:
            return newest_end
        return 0 if size <= oldest else None

    def give_back(self, batches: int) -> None:
        """The oldest ones."""
        for _ in range(batches):
            self._taken.popleft()
