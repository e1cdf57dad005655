"""Which version each label means: the newest that has it.

Manifests say it of the versions on disk. By ``min_weight_version`` a trainer may ask for one that has been dropped
since, so the file LABELS keeps the newest ``MOST_LABELS``. It is written after LATEST: what a crash leaves out of it,
or a disk that is full, is read from the manifests by the next process.
"""

import logging
from collections.abc import Iterable

from rollout_service.errors import LogCorrupt, NotFound
from rollout_service.store.log import KnownLabels, WeightLog

logger = logging.getLogger(__name__)

MOST_LABELS = 1000
_NAMED = 20
"""Labels that an error lists."""


class VersionLabels:
    """The labels of one log; kept by the process that writes it."""

    def __init__(self, log: WeightLog) -> None:
        self._log = log
        self._versions: dict[str, int] = {}

    def load(self) -> None:
        """Take up what the log has. What is damaged of it, beside LATEST, only loses labels. Raises LogCorrupt."""
        head = self._log.head()
        newest = -1 if head is None else head.version
        try:
            known = self._log.labels()
        except LogCorrupt as error:
            logger.warning("labels of versions that are not on disk any more are lost: %s", error)
            known = KnownLabels()
        # a log that was restored from a backup has versions of its own under numbers that LABELS names
        through = min(known.through, newest)
        found = {label: version for label, version in known.labels.items() if version <= newest}
        for version in (version for version in self._log.versions() if version > through):
            try:
                label = self._log.manifest(version).label
            except LogCorrupt as error:
                logger.warning("the label of version %d is lost, if it had one: %s", version, error)
            else:
                found |= {} if label is None else {label: version}
        self._versions = found

    def note(self, version: int, label: str | None) -> None:
        """A version was committed. Another thread may read meanwhile."""
        if label is None:
            return
        versions = {**self._versions, label: version}
        newest = sorted(versions, key=versions.__getitem__)[-MOST_LABELS:]
        self._versions = {label: versions[label] for label in newest}  # replaced at once: others read it meanwhile
        try:
            self._log.set_labels(KnownLabels(through=version, labels=self._versions))
        except OSError as error:  # the version is committed, and its manifest has the label
            logger.warning("the label %s of version %d is not in LABELS yet: %s", label, version, error)

    def number_of(self, version: int | str) -> int:
        """The newest version that has a label; a number is its own. Raises NotFound, with the newest labels."""
        if isinstance(version, int):
            return version
        versions = self._versions
        if version not in versions:
            newest = sorted(versions, key=versions.__getitem__, reverse=True)[:_NAMED]
            raise NotFound(
                f"no version has the label {version!r}; the newest labels are {', '.join(newest) or 'none'}: give a "
                "number, or push a version with that label",
                {"label": version, "labels": newest},
            )
        return versions[version]

    def spelled(self, versions: Iterable[int]) -> str:
        """For messages: numbers, each with the label by which it can be asked for."""
        labels = {number: label for label, number in self._versions.items()}
        return ", ".join(f"{number} ({labels[number]})" if number in labels else str(number) for number in versions)
