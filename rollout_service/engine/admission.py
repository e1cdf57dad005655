"""Limit on the sequences that a replica holds.

Serve's ``max_ongoing_requests`` does not serve this purpose. It queues calls instead of refusing them, so a replica
full of paused rollouts would block the calls that resume it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rollout_service.errors import Overloaded


class AdmissionLimit:
    """Counts the sequences in flight."""

    def __init__(self, limit: int, share: int = 0) -> None:
        """Create the limit. ``share``: the number of sequences guaranteed to each gateway."""
        self._limit, self._share = limit, share
        self.running = 0
        """Number of admitted sequences without an answer."""
        self._by_origin: Counter[str] = Counter()

    def by_origin(self) -> dict[str, int]:
        """Return ``running`` by gateway."""
        return dict(self._by_origin)

    @contextmanager
    def admit(self, sequences: int, origin: str = "") -> Iterator[None]:
        """Count ``sequences`` of the gateway ``origin`` as running. Raises Overloaded at the limit.

        One free place admits a request of any size. A large request that needed all its places at once would starve
        behind small ones.
        """
        if self.running >= self._limit and self._by_origin.get(origin, 0) >= self._share:
            raise Overloaded(
                f"this replica holds {self.running} of {self._limit} sequences and {sequences} more were asked for: "
                "the gateway's queue sends them again when others have ended",
                {"running": self.running, "limit": self._limit, "asked": sequences},
            )
        self.running += sequences
        self._by_origin[origin] += sequences
        try:
            yield
        finally:
            self.running -= sequences
            self._by_origin[origin] -= sequences
            if not self._by_origin[origin]:
                del self._by_origin[origin]
