"""Labels of versions. A label means the newest version that has it.

The manifests of versions on disk contain their labels. A trainer may also use ``min_weight_version`` with the label of
a dropped version, so the file LABELS keeps the newest ``MAX_LABELS``. It is written after LATEST. If a crash or a full
disk prevents that, the next process reads the missing labels from the manifests.
"""

import logging
from collections.abc import Iterable, Sequence

from rollout_service.errors import LogCorrupt, LogUnreadable, NotFound
from rollout_service.store.log import KnownLabels, WeightLog

logger = logging.getLogger(__name__)

MAX_LABELS = 1000
_NAMED = 20
"""Number of labels that an error lists."""


class VersionLabels:
    """The labels of one log; used by the process that writes it."""

    def __init__(self, log: WeightLog) -> None:
        self._log = log
        self._versions: dict[str, int] = {}

    def load(self) -> None:
        """Load the log's labels. A version that cannot be read loses its label. Raises LogCorrupt, LogUnreadable."""
        head = self._log.head()
        newest = -1 if head is None else head.version
        try:
            known = self._log.labels()
        except LogCorrupt as error:
            logger.warning("labels of versions that are not on disk any more are lost: %s", error)
            known = KnownLabels()
        # a log restored from a backup may have different versions under numbers that LABELS contains
        through = min(known.through, newest)
        found = {label: version for label, version in known.labels.items() if version <= newest}
        for version in (version for version in self._log.versions() if version > through):
            try:
                label = self._log.manifest(version).label
            except (LogCorrupt, LogUnreadable) as error:
                logger.warning("the label of version %d is lost, if it had one: %s", version, error)
            else:
                found |= {} if label is None else {label: version}
        self._versions = found

    def note(self, version: int, label: str | None) -> None:
        """Record the label of a committed version. Thread-safe for readers."""
        if label is None:
            return
        versions = {**self._versions, label: version}
        newest = sorted(versions, key=versions.__getitem__)[-MAX_LABELS:]
        # replaced atomically, since other threads read it
        self._versions = {label: versions[label] for label in newest}
        try:
            self._log.set_labels(KnownLabels(through=version, labels=self._versions))
        except OSError as error:  # the version is committed, and its manifest has the label
            logger.warning("the label %s of version %d is not in LABELS yet: %s", label, version, error)

    def find(self, version: int | str) -> int | None:
        """Return the newest version with a label, or None; a number is returned unchanged."""
        return version if isinstance(version, int) else self._versions.get(version)

    def number_of(self, version: int | str) -> int:
        """Return the newest version with a label, or a number unchanged. Raises NotFound, with the newest labels."""
        versions = self._versions
        if (found := self.find(version)) is not None:
            return found
        newest = sorted(versions, key=versions.__getitem__, reverse=True)[:_NAMED]
        raise NotFound(
            f"no version has the label {version!r}; the newest labels are {', '.join(newest) or 'none'}: give a "
            "number, or push a version with that label",
            {"label": version, "labels": newest},
        )

    def spelled(self, versions: Iterable[int]) -> str:
        """Format versions for messages: numbers, each with its label."""
        labels = {number: label for label, number in self._versions.items()}
        return ", ".join(f"{number} ({labels[number]})" if number in labels else str(number) for number in versions)


def require_kept(kept: Sequence[int], version: int, labels: VersionLabels) -> None:
    """Raise NotFound, with the kept versions, if ``version`` is not in ``kept``, which is in order."""
    if version not in kept:
        raise NotFound(
            f"version {labels.spelled([version])} cannot be made the newest again, because it is not in the log "
            f"{'any more' if kept and version < kept[-1] else 'yet'}: kept are {labels.spelled(kept)}. "
            "weights.keep_versions says how many stay; push older weights as a new version",
            {"version": version, "versions": kept},
        )
