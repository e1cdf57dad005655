"""Numbers of versions that were served before they were in a log on a disk, with the digest of each: its file SERVED.

With ``weights.durability: behind`` a number is noted here before its version is live. If the host then crashes and
takes the version with it, what was sampled from that number is still that digest's alone: it is refused for any other.
Only numbers above the newest version of the log are kept, as no other can come again.
"""

import threading

from rollout_service.errors import InsufficientStorage, VersionConflict
from rollout_service.protocol.base import NEXT
from rollout_service.store.log import WeightLog

MOST_SERVED = 10_000
"""Versions that may be served while the disk takes none."""


class ServedNumbers:
    """Those of one log on a disk; threads may share it."""

    def __init__(self, log: WeightLog) -> None:
        self._log = log
        self._digests: dict[int, str] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Take up what the log has. Raises LogCorrupt."""
        head = self._log.head()
        newest = -1 if head is None else head.version
        with self._lock:
            self._digests = {number: digest for number, digest in self._log.served().items() if number > newest}

    @property
    def newest(self) -> int:
        """The largest number that is noted; -1: none is."""
        return max(self._digests, default=-1)

    @property
    def digests(self) -> dict[int, str]:
        """Number → digest."""
        return dict(self._digests)

    def require(self, version: int, digest: str) -> None:
        """Raise VersionConflict if the number stands for another digest."""
        known = self._digests.get(version, digest)
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
            if version in self._digests:
                return
            if len(self._digests) >= MOST_SERVED:
                raise InsufficientStorage(
                    f"version {version} is not committed: {MOST_SERVED} versions have been served since the last one "
                    f"that is on the disk at {self._log.root}; GET /v1/weights says why it takes none",
                    {"version": version, "served": MOST_SERVED},
                )
            self._set({**self._digests, version: digest})

    def forget(self, version: int) -> None:
        """A version that was noted was not served after all. Raises OSError."""
        with self._lock:
            self._set({number: digest for number, digest in self._digests.items() if number != version})

    def forget_through(self, newest: int) -> None:
        """A version is in the log: no number up to its own can come again. Raises OSError."""
        with self._lock:
            self._set({number: digest for number, digest in self._digests.items() if number > newest})

    def replace(self, digests: dict[int, str]) -> None:
        """What a log in memory says that has outlived its ingest. Raises OSError."""
        with self._lock:
            self._set(digests)

    def _set(self, digests: dict[int, str]) -> None:
        if digests != self._digests:
            self._log.set_served(digests)
            self._digests = digests
