"""The replica's own limit on what it holds.

Serve's ``max_ongoing_requests`` cannot do it: it queues instead of answering, and a replica full of paused rollouts
would hold up the calls that are to resume it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rollout_service.errors import Overloaded


class AdmissionLimit:
    """Counts sequences in flight."""

    def __init__(self, limit: int, share: int = 0) -> None:
        """``share``: the part of the limit that each gateway has, whatever the other gateways hold."""
        self._limit, self._share = limit, share
        self.running = 0
        """Sequences admitted and not yet answered."""
        self._by_origin: Counter[str] = Counter()

    def by_origin(self) -> dict[str, int]:
        """``running``, by the gateway that sent them."""
        return dict(self._by_origin)

    @contextmanager
    def admit(self, sequences: int, origin: str = "") -> Iterator[None]:
        """Hold ``sequences`` places for the gateway ``origin``. Raises Overloaded when the limit is reached.

        One free place is enough for a request of any size. A large request that needed all its places at once would
        wait for ever behind small ones.
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
