"""A replica that starts is seen: it reports before its engine exists, and while loading keeps the event loop busy."""

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Self

from rollout_service.types import ReplicaStatus
from rollout_service.weights.ask import RAY_FAILURES

logger = logging.getLogger(__name__)

REPORTS = itertools.count()
"""Numbers the reports of this process's replica, so that one overtaken on its way is not taken for news."""


class Announcement:
    """Reports to the ingest every ``period_s`` seconds, from a thread of its own, until the ``with`` block ends."""

    def __init__(self, replica_id: str, ingest: Any, period_s: float) -> None:
        """``ingest``: handle of the ingest deployment."""
        self._replica_id = replica_id
        self.status: Callable[[], ReplicaStatus] = self._starting
        """What is reported."""
        self._ingest, self._period_s = ingest, period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="announce", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def start_over(self) -> None:
        """The engine that was being started is given up for another one."""
        self.status = self._starting

    def _starting(self) -> ReplicaStatus:
        return ReplicaStatus(replica_id=self._replica_id, sequence=next(REPORTS), version=None, state="starting")

    def _report(self) -> None:
        while not self._ended.is_set():
            try:
                self._ingest.report.remote(self.status()).result(timeout_s=self._period_s)
            except (*RAY_FAILURES, TimeoutError) as error:
                logger.info("could not tell the ingest that this replica starts: %s", error)
            self._ended.wait(self._period_s)
