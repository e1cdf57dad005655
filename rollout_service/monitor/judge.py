"""Judge versions as suspect, with hysteresis between two thresholds."""

import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from rollout_service.config import MonitorConfig
from rollout_service.monitor.statistics import Sums
from rollout_service.monitor.table import Entry, Key

logger = logging.getLogger(__name__)
CLEARS_AT = 0.8
"""A suspect row is cleared below this share of both thresholds."""


@dataclass(frozen=True)
class Judge:
    """Judges a row after each report that changed it."""

    config: MonitorConfig

    def judge(self, key: Key, entry: Entry) -> None:
        """Mark or clear ``entry``, with a log message if that changes."""
        sums, before = entry.statistics.sums, entry.suspect_since
        if not self.is_suspect(sums, before is not None):
            entry.suspect_since = None
            if before is not None:
                logger.warning("%s is not suspect any more: %s", _name(key), self._figures(sums))
        elif before is None:
            entry.suspect_since = time.time()
            logger.warning(
                "%s is suspect since %s: %s. A broken update, unless every version and replica is like that",
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
