"""A replica that starts is seen: it reports before its engine exists, and while loading keeps the event loop busy."""

import logging
import threading
from collections.abc import Callable
from typing import Any, Self

from rollout_service.types import ReplicaStatus
from rollout_service.weights.copies import RAY_FAILURES

logger = logging.getLogger(__name__)


class Announcement:
    """Reports to the ingest every ``period_s`` seconds, from a thread of its own, until the ``with`` block ends."""

    def __init__(self, replica_id: str, ingest: Any, period_s: float) -> None:
        """``ingest``: handle of the ingest deployment."""
        starting = ReplicaStatus(replica_id=replica_id, version=None, state="starting")
        self.status: Callable[[], ReplicaStatus] = lambda: starting
        """What is reported. Any other report is newer than the one that this replica is starting."""
        self._ingest, self._period_s = ingest, period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="announce", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _report(self) -> None:
        while not self._ended.is_set():
            try:
                self._ingest.report.remote(self.status()).result(timeout_s=self._period_s)
            except (*RAY_FAILURES, TimeoutError) as error:
                logger.info("could not tell the ingest that this replica starts: %s", error)
            self._ended.wait(self._period_s)
