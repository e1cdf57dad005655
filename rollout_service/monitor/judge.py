"""Judge versions as suspect, and choose the maximum age of kept keys and values."""

import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from rollout_service.config import MonitorConfig
from rollout_service.monitor.scoring import MAX_AGE
from rollout_service.monitor.statistics import Sums
from rollout_service.monitor.table import Entry, Key, VersionTable
from rollout_service.protocol.mismatch import FIRST_KV_AGE

logger = logging.getLogger(__name__)
CLEARS_AT = 0.8
"""A suspect row is cleared below this share of both thresholds."""


@dataclass(frozen=True)
class Judge:
    """Judges a row as suspect after each report that changed it, with hysteresis between two thresholds."""

    config: MonitorConfig

    def judge(self, key: Key, entry: Entry) -> None:
        """Mark or clear ``entry``, with a log message if that changes."""
        sums, before = entry.statistics.sums, entry.suspect_since
        if not self.is_suspect(sums, before is not None):
            entry.suspect_since = None
            if before is not None:
                logger.warning("%s is no longer suspect: %s", _name(key), self._figures(sums))
        elif before is None:
            entry.suspect_since = time.time()
            logger.warning(
                "%s is suspect since %s: %s. If other versions or replicas are not suspect, this update is broken",
                _name(key),
                datetime.fromtimestamp(entry.suspect_since, UTC).isoformat(timespec="seconds"),
                self._figures(sums),
            )

    def is_suspect(self, sums: Sums, before: bool) -> bool:
        """Return True if a row with these sums is suspect, given whether it was ``before``."""
        if sums.tokens < self.config.min_tokens:
            return before
        share = CLEARS_AT if before else 1.0
        error_above_one = self.config.suspect_prob_error - 1.0
        return sums.mean_k3 > share * self.config.suspect_k3 or sums.mean_judged_error - 1.0 > share * error_above_one

    def _figures(self, sums: Sums) -> str:
        return (
            f"k3 {sums.mean_k3:.4g} (threshold {self.config.suspect_k3:g}), probability error "
            f"{sums.mean_judged_error:.4g} (threshold {self.config.suspect_prob_error:g}), over {sums.tokens} tokens"
        )


def _name(key: Key) -> str:
    adapter = "" if key.adapter is None else f"adapter {key.adapter}@{key.adapter_version} with "
    return f"{adapter}weight version {key.version} on replica {key.replica_id}"


class KVAgeLimit:
    """Chooses the maximum age of kept keys and values, for ``weights.kv_max_age: auto``.

    Raises the age by one while the oldest keys and values are harmless, and halves it once some are not.

    Ages are judged by the thresholds of suspect versions, over the tokens that were sampled since the last change.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._age, self._since = FIRST_KV_AGE, 0
        self._choices: dict[int, int] = {}
        """The last two versions, and the age that was chosen for each."""

    @property
    def chosen(self) -> int | None:
        """Return the last choice; None: nobody has asked."""
        return self._age if self._choices else None

    def choose(self, version: int, table: VersionTable) -> int:
        """Return the maximum age for ``version``, which replicas are about to load. All get the same answer, also a
        replica that is still at the version before."""
        if version in self._choices:
            return self._choices[version]
        self._since = min(self._since, version)  # a log that was set back counts anew
        measured = table.by_kv_age(self._since)
        age = self._changed(measured)
        if age != self._age:
            logger.info("weights.kv_max_age is %d from version %d on, and was %d", age, version, self._age)
            self._age, self._since = age, version
        self._choices = {**dict(list(self._choices.items())[-1:]), version: age}
        return age

    def _changed(self, measured: dict[int, Sums]) -> int:
        harmful = [age for age, sums in measured.items() if self._judge.is_suspect(sums, False)]
        if harmful:
            return min(harmful) // 2
        oldest = measured.get(self._age, Sums())
        return min(self._age + 1, MAX_AGE) if oldest.tokens >= self._judge.config.min_tokens else self._age
