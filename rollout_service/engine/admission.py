"""The replica's own limit on what it holds.

Serve's ``max_ongoing_requests`` cannot do it: it queues instead of answering, and a replica full of paused rollouts
would hold up the calls that are to resume it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rollout_service.errors import Overloaded


class AdmissionLimit:
    """Counts sequences in flight."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.running = 0
        """Sequences admitted and not yet answered."""

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Hold ``sequences`` places. Raises Overloaded when they are not free.

        A request larger than the limit is admitted when nothing else runs, or it could never be.
        """
        if self.running and self.running + sequences > self._limit:
            raise Overloaded(
                f"this replica holds {self.running} of {self._limit} sequences and {sequences} more were asked for: "
                "retry later, or raise engine.admission_limit",
                {"running": self.running, "limit": self._limit, "asked": sequences},
            )
        self.running += sequences
        try:
            yield
        finally:
            self.running -= sequences
