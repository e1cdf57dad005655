"""What a replica reports while it starts: heartbeats before its engine exists, and why it could not start."""

import asyncio
import functools
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

from ray import serve
from ray.serve.handle import DeploymentHandle

from rollout_service.config import ServiceConfig
from rollout_service.engine.child_errors import collected_errors, reason_of
from rollout_service.errors import RolloutServiceError
from rollout_service.protocol.fleet import ReplicaStatus
from rollout_service.runtime.rpc import IngestCalls, ingest_client, report_from_thread

logger = logging.getLogger(__name__)

REPORTS = itertools.count()
"""Numbers the reports of this process's replica, so that one overtaken on its way is not taken for news."""

_LAST_WORD_S = 5.0
"""A replica that could not start waits no longer for the ingest: Serve waits for it, to start another."""

_Replica = TypeVar("_Replica")
Constructor = Callable[[_Replica, ServiceConfig, DeploymentHandle], Awaitable[None]]


def says_why_it_fails(init: Constructor[_Replica]) -> Constructor[_Replica]:
    """For the constructor of an engine replica, which is given the configuration and the ingest's handle.

    A failure is logged where ``serve run`` shows it, with what vLLM's own processes said of it, and reported to the
    ingest. It is raised again with the same added, so that Serve's status has it, too.
    """

    @functools.wraps(init)
    async def constructor(self: _Replica, config: ServiceConfig, ingest: DeploymentHandle) -> None:
        with collected_errors() as errors:
            try:
                await init(self, config, ingest)
            except Exception as error:
                reason = reason_of(error)
                if (root := errors.first()) is not None:
                    reason = f"{root} ({reason})"
                    error.add_note(root)
                replica_id = serve.get_replica_context().replica_id.unique_id
                logger.error("engine replica %s could not start: %s", replica_id, reason)
                await report_failed_start(replica_id, ingest_client(ingest), reason)
                raise

    return constructor


async def report_failed_start(replica_id: str, ingest: IngestCalls, reason: str) -> None:
    """Tell the ingest; if it does not answer, Serve's status is all there is."""
    status = ReplicaStatus(replica_id=replica_id, sequence=next(REPORTS), version=None, state="failed", error=reason)
    try:
        async with asyncio.timeout(_LAST_WORD_S):
            await ingest.report(status)
    except (RolloutServiceError, TimeoutError) as error:
        logger.warning("could not tell the ingest why this replica did not start: %s", error)


class StartupHeartbeat:
    """Reports to the ingest every ``period_s`` seconds, from a thread of its own, until the ``with`` block ends."""

    def __init__(self, replica_id: str, ingest: DeploymentHandle, period_s: float) -> None:
        self._replica_id = replica_id
        self.status: Callable[[], ReplicaStatus] = self._starting
        """What is reported."""
        self._waits_for: str | None = None
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

    def waits_for(self, reason: str | None) -> None:
        """Report why no engine is started yet. None: nothing keeps it from starting any more."""
        self._waits_for = reason

    def _starting(self) -> ReplicaStatus:
        return ReplicaStatus(
            replica_id=self._replica_id,
            sequence=next(REPORTS),
            version=None,
            state="starting",
            error=self._waits_for,
        )

    def _report(self) -> None:
        while not self._ended.is_set():
            try:
                report_from_thread(self._ingest, self.status(), timeout_s=self._period_s)
            except (RolloutServiceError, TimeoutError) as error:
                logger.info("could not tell the ingest that this replica starts: %s", error)
            self._ended.wait(self._period_s)
