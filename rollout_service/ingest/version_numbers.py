"""Numbers for new versions: above the newest committed one, and within what a double holds exactly."""

from collections.abc import Collection, Iterable

from rollout_service.errors import VersionConflict
from rollout_service.protocol.base import MAX_VERSION, NEXT
from rollout_service.store.labels import VersionLabels
from rollout_service.store.log import WeightLog


class VersionNumbers:
    """The numbers of one log's versions."""

    def __init__(self, log: WeightLog, labels: VersionLabels) -> None:
        """``labels``: the log's labels, for messages."""
        self._log, self._labels = log, labels

    @property
    def newest(self) -> int:
        """Return the largest number of a committed version; -1: there is none."""
        head = self._log.head()
        return -1 if head is None else head.version

    def after(self, taken: Iterable[int]) -> int:
        """Return the first number above all committed versions and ``taken``. Raises VersionConflict."""
        return _within_bounds(max([self.newest, *taken]) + 1)

    def first_free(self, taken: Collection[int]) -> int:
        """Return the first number above the newest version that is not in ``taken``. Raises VersionConflict."""
        number = self.newest + 1
        while number in taken:
            number += 1
        return _within_bounds(number)

    def require_newer(self, version: int) -> None:
        """Raise VersionConflict for a version that is not newer than the newest committed one."""
        head = self._log.head()
        if head is not None and version <= head.version:
            kept = self._log.versions()
            raise VersionConflict(
                f"version {version} is not newer than the newest committed version {head.version} "
                f"(digest {head.digest}), and versions only grow. A trainer that has gone back pushes the version "
                f"{NEXT!r}, with a label of its own such as 'run/step-{version}'; client.rollback(to=…), POST "
                "/v1/weights/rollback or `rollout-service log rollback` make a kept version the newest again, of "
                f"{self._labels.spelled(kept)}",
                {
                    "version": version,
                    "latest_version": head.version,
                    "latest_digest": head.digest,
                    "kept_versions": kept,
                },
            )


def _within_bounds(number: int) -> int:
    if number > MAX_VERSION:
        raise VersionConflict(
            f"version {MAX_VERSION} is the last that there can be: name another weights.root, which begins anew",
            {"version": number},
        )
    return number
