"""Numbers of versions that were served before they were in a log on a disk, with the digest of each: its file SERVED.

With ``weights.durability: behind`` a number is noted here before its version is live. If the host then crashes and
takes the version with it, what was sampled from that number is still that digest's alone: it is refused for any other.
Only numbers above the newest version of the log are kept, as no other can come again.
"""

import threading

from rollout_service.errors import InsufficientStorage, VersionConflict
from rollout_service.protocol.base import NEXT
from rollout_service.store.log import KnownServed, WeightLog

MOST_SERVED = 10_000
"""Versions that may be served while the disk takes none."""


class ServedNumbers:
    """Those of one log on a disk; threads may share it."""

    def __init__(self, log: WeightLog) -> None:
        self._log = log
        self._known = KnownServed()
        self._lock = threading.Lock()

    def load(self) -> None:
        """Take up what the log has. Raises LogCorrupt."""
        head = self._log.head()
        with self._lock:
            self._known = _above(-1 if head is None else head.version, self._log.served())

    @property
    def newest(self) -> int:
        """The largest number that is noted; -1: none is."""
        return max(self._known.digests, default=-1)

    @property
    def digests(self) -> dict[int, str]:
        """Number → digest."""
        return dict(self._known.digests)

    @property
    def lost(self) -> frozenset[int]:
        """Those of them whose versions are gone."""
        return self._known.lost

    def require(self, version: int, digest: str) -> None:
        """Raise VersionConflict if the number stands for another digest."""
        known = self._known.digests.get(version, digest)
        if known != digest:
            raise VersionConflict(
                f"version {version} was served with the digest {known}, and was lost with the memory of a host that "
                f"crashed before it was on the disk at {self._log.root}; it is {digest} now, and a number means one "
                f"digest only: push these weights as version {NEXT!r}",
                {"version": version, "digests": [known, digest]},
            )

    def note(self, version: int, digest: str) -> None:
        """Have the number stand for that digest from now on, durably.

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
        """A version that was noted was not served after all, unless it is one that was lost. Raises OSError."""
        with self._lock:
            if version not in self._known.lost:
                left = {number: digest for number, digest in self._known.digests.items() if number != version}
                self._set(left, self._known.lost)

    def forget_through(self, newest: int) -> None:
        """A version is in the log: no number up to its own can come again. Raises OSError."""
        with self._lock:
            left = _above(newest, self._known)
            self._set(left.digests, left.lost)

    def all_lost(self) -> None:
        """What was served is in no memory any more. Raises OSError."""
        with self._lock:
            self._set(self._known.digests, frozenset(self._known.digests))

    def in_memory(self, digests: dict[int, str], newest: int) -> None:
        """What a log in memory says that has outlived its ingest: these versions above the disk's newest are there.

        What is noted above its ``newest`` and was not lost before was never served: its commit has not come so far.
        Raises OSError.
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
