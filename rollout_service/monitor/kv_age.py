"""Choose the maximum age of kept keys and values, for ``weights.kv_max_age: auto``."""

import logging

from rollout_service.monitor.judge import Judge
from rollout_service.monitor.scoring import MAX_AGE
from rollout_service.monitor.statistics import Sums
from rollout_service.monitor.table import VersionTable
from rollout_service.protocol.mismatch import FIRST_KV_AGE

logger = logging.getLogger(__name__)


class KVAgeLimit:
    """Raises the age by one while the oldest keys and values are harmless, and halves it once some are not.

    Ages are judged by the thresholds of suspect versions, over the tokens that were sampled since the last change.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._age, self._since = FIRST_KV_AGE, 0
        self._version: int | None = None
        """The version of the last choice."""

    @property
    def chosen(self) -> int | None:
        """Return the last choice; None: nobody has asked."""
        return None if self._version is None else self._age

    def choose(self, version: int, table: VersionTable) -> int:
        """Return the maximum age for ``version``, which replicas are about to load. All get the same answer."""
        if version == self._version:
            return self._age
        self._version, self._since = version, min(self._since, version)  # a log that was set back counts anew
        measured = table.by_kv_age(self._since)
        age = self._changed(measured)
        if age != self._age:
            logger.info("weights.kv_max_age is %d from version %d on, and was %d", age, version, self._age)
            self._age, self._since = age, version
        return age

    def _changed(self, measured: dict[int, Sums]) -> int:
        harmful = [age for age, sums in measured.items() if self._judge.is_suspect(sums, False)]
        if harmful:
            return min(harmful) // 2
        oldest = measured.get(self._age, Sums())
        return min(self._age + 1, MAX_AGE) if oldest.tokens >= self._judge.config.min_tokens else self._age
