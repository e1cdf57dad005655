"""Digests of versions that were served before they were in a log on a disk: the log's file SERVED.

With ``weights.durability: behind``, a number is recorded here before its version is live. If the host then crashes and
loses the version, rollouts sampled from it still exist, so the number is refused for any other digest. Only numbers
above the log's newest version are kept, since lower ones cannot be used again.
"""

import threading

from rollout_service.errors import InsufficientStorage, VersionConflict
from rollout_service.protocol.base import NEXT
from rollout_service.store.log import KnownServed, WeightLog

MOST_SERVED = 10_000
"""Maximum number of versions that may be served while the disk accepts none."""


class ServedNumbers:
    """Served numbers of one log on a disk. Thread-safe."""

    def __init__(self, log: WeightLog) -> None:
        self._log = log
        self._known = KnownServed()
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the log's file. Raises LogCorrupt."""
        head = self._log.head()
        with self._lock:
            self._known = _above(-1 if head is None else head.version, self._log.served())

    @property
    def newest(self) -> int:
        """Return the largest recorded number; -1: there is none."""
        return max(self._known.digests, default=-1)

    @property
    def digests(self) -> dict[int, str]:
        """Return the digest of each number."""
        return dict(self._known.digests)

    @property
    def lost(self) -> frozenset[int]:
        """Return the numbers whose versions are lost."""
        return self._known.lost

    def require(self, version: int, digest: str) -> None:
        """Raise VersionConflict if the number has another digest."""
        known = self._known.digests.get(version, digest)
        if known != digest:
            raise VersionConflict(
                f"version {version} was served with the digest {known}, and was lost with the memory of a host that "
                f"crashed before it was on the disk at {self._log.root}; it is {digest} now, and a number means one "
                f"digest only: push these weights as version {NEXT!r}",
                {"version": version, "digests": [known, digest]},
            )

    def note(self, version: int, digest: str) -> None:
        """Record the digest of the number durably.

        Raises VersionConflict, OSError, or InsufficientStorage once ``MOST_SERVED`` versions are not on the disk.
        """
        with self._lock:
            self.require(version, digest)
            if version in self._known.digests:
                return
            if len(self._known.digests) >= MOST_SERVED:
                raise InsufficientStorage(
                    f"version {version} is not committed: {MOST_SERVED} versions have been served since the last one "
                    f"that is on the disk at {self._log.root}; GET /v1/weights says why it takes none",
                    {"version": version, "served": MOST_SERVED},
                )
            self._set({**self._known.digests, version: digest}, self._known.lost)

    def forget(self, version: int) -> None:
        """Remove the number of a version that was not served after all, unless it was lost. Raises OSError."""
        with self._lock:
            if version not in self._known.lost:
                left = {number: digest for number, digest in self._known.digests.items() if number != version}
                self._set(left, self._known.lost)

    def forget_through(self, newest: int) -> None:
        """Remove the numbers up to that of a version in the log: they cannot be used again. Raises OSError."""
        with self._lock:
            left = _above(newest, self._known)
            self._set(left.digests, left.lost)

    def all_lost(self) -> None:
        """Mark all numbers as lost: no memory has their versions any more. Raises OSError."""
        with self._lock:
            self._set(self._known.digests, frozenset(self._known.digests))

    def in_memory(self, digests: dict[int, str], newest: int) -> None:
        """Record the versions above the disk's newest that a log in memory still has after its ingest ended.

        Recorded numbers above its ``newest`` that are not lost were never served: their commit did not complete. They
        are removed. Raises OSError.
        """
        with self._lock:
            noted = self._known.digests.items()
            kept = {number: digest for number, digest in noted if number <= newest or number in self._known.lost}
            self._set(kept | digests, self._known.lost)

    def _set(self, digests: dict[int, str], lost: frozenset[int]) -> None:
        known = KnownServed(digests=digests, lost=lost)
        if known != self._known:
            self._log.set_served(known)
            self._known = known


def _above(newest: int, known: KnownServed) -> KnownServed:
    digests = {number: digest for number, digest in known.digests.items() if number > newest}
    return KnownServed(digests=digests, lost=known.lost & digests.keys())
