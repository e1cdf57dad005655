"""The monitor: accepts reports, stores their statistics, and judges versions as suspect.

All its state is in memory: after a restart it is empty.
"""

import asyncio
import logging
from collections import OrderedDict

from rollout_service.config import MonitorConfig
from rollout_service.errors import InvalidRequest
from rollout_service.monitor.judge import Judge, KVAgeLimit
from rollout_service.monitor.scoring import Scored, parse_report, score
from rollout_service.monitor.statistics import Statistics
from rollout_service.monitor.table import Key, VersionTable
from rollout_service.protocol.adapters import read_adapter_name
from rollout_service.protocol.mismatch import MismatchReceipt, MismatchRow, MismatchTable, Suspicion
from rollout_service.runtime.recent import remember

logger = logging.getLogger(__name__)
KEEP_VERSIONS = 64
"""Number of versions whose statistics are kept, about 12 KB for each replica of each."""
REPORT_IDS = 10_000
"""Maximum number of reports whose receipts are remembered, to count each once."""
LATE_REPORTS = 10
"""Maximum number of reports in a row of versions older than all kept ones. More come from a weight log that was lost,
whose versions begin again."""


class Monitor:
    """Mismatch statistics. Every public coroutine can be called through the deployment's handle."""

    def __init__(self, config: MonitorConfig, keep_versions: int = KEEP_VERSIONS) -> None:
        self._config = config
        self._table = VersionTable(keep_versions)
        self._judge = Judge(config)
        self._kv_age = KVAgeLimit(self._judge)
        self._receipts: OrderedDict[str, MismatchReceipt] = OrderedDict()
        self._reporting = asyncio.Lock()
        self._num_late = 0
        """Number of the last reports, in a row, of versions older than all kept ones."""

    async def report(self, body: bytes) -> MismatchReceipt:
        """Count a trainer's report (JSON of ``MismatchReport``), all of it or nothing.

        Raises InvalidRequest, or MalformedRequest for invalid JSON.
        """
        report = await asyncio.to_thread(parse_report, body)
        async with self._reporting:  # one at a time: a repeated report must find the first one's receipt
            known = None if report.report_id is None else self._receipts.get(report.report_id)
            if known is not None:
                return known.model_copy(update={"repeated": True})
            scored = await asyncio.to_thread(score, report, self._config.ratio_bound)
            return self._count(report.report_id, scored)

    async def rows(self) -> list[MismatchRow]:
        """Return the statistics of each version, replica and adapter, oldest version first."""
        return self._table.rows()

    async def table(
        self, version: int | None = None, replica_id: str | None = None, adapter: str | None = None
    ) -> MismatchTable:
        """Return the rows, and the same merged over replicas.

        Filters; None: all. ``adapter``: a name, or a name and a version as in ``run-a@3``.
        """
        named = None if adapter is None else read_adapter_name(adapter)
        if adapter is not None and named is None:
            raise InvalidRequest(f"adapter={adapter} is no adapter's name: give one such as run-a or run-a@3")

        def matches(key: Key) -> bool:
            return (
                version in (None, key.version)
                and replica_id in (None, key.replica_id)
                and (named is None or (key.adapter == named[0] and named[1] in (None, key.adapter_version)))
            )

        return MismatchTable(
            rows=tuple(self._table.rows(matches)),
            versions=tuple(self._table.merge_replicas(matches)),
            truncated=tuple(self._table.truncated(matches)),
            kv_max_age=self._kv_age.chosen,
        )

    async def per_replica(self) -> MismatchTable:
        """Return the table without merged rows, which would need a merge of sketches for each replica."""
        return MismatchTable(rows=tuple(await self.rows()), versions=(), truncated=tuple(self._table.truncated()))

    async def suspicions(self) -> dict[int, tuple[Suspicion, ...]]:
        """Return the suspicions by version."""
        return self._table.suspicions()

    async def kv_max_age(self, version: int) -> int:
        """Return the maximum age of kept keys and values for a version that a replica is about to load."""
        return self._kv_age.choose(version, self._table)

    def _count(self, report_id: str | None, scored: Scored) -> MismatchReceipt:
        self._begin_anew_after_lost_log({key.version for key in (*scored.statistics, *scored.truncated)})
        taken = [self._add(key, statistics) for key, statistics in scored.statistics.items()]
        tokens = [statistics.sums.tokens for statistics in scored.statistics.values()]
        for key, count in scored.truncated.items():
            self._table.add_truncated(key, count)
        receipt = MismatchReceipt(
            tokens=sum(tokens),
            too_old_tokens=sum(count for count, kept in zip(tokens, taken, strict=True) if not kept),
            truncated_tokens=sum(scored.truncated.values()),
        )
        if report_id is not None:
            remember(self._receipts, report_id, receipt, REPORT_IDS)
        return receipt

    def _begin_anew_after_lost_log(self, versions: set[int]) -> None:
        """Drop all statistics if more than ``LATE_REPORTS`` in a row, now one of ``versions``, were too old."""
        if versions:
            self._num_late = self._num_late + 1 if self._table.is_too_old(max(versions)) else 0
        if self._num_late > LATE_REPORTS:
            logger.warning(
                "the mismatch is counted anew from version %d on: %d reports in a row were of versions older than all "
                "kept ones, so the weight log was replaced or set back",
                min(versions), self._num_late,
            )  # fmt: skip
            self._table.clear()
            self._num_late = 0

    def _add(self, key: Key, statistics: Statistics) -> bool:
        entry = self._table.add(key, statistics)
        if entry is not None:
            self._judge.judge(key, entry)
        return entry is not None
