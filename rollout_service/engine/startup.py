"""Reports of a replica during its start: heartbeats before its engine exists, and the reason of a failed start."""

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
"""Counter of this process's reports, so that a delayed report is not taken for the newest."""

_LAST_WORD_S = 5.0
"""Timeout in seconds for reporting a failed start, because Serve starts another replica only after this one ends."""

_Replica = TypeVar("_Replica")
Constructor = Callable[[_Replica, ServiceConfig, DeploymentHandle, DeploymentHandle, str | None], Awaitable[None]]


def says_why_it_fails(init: Constructor[_Replica]) -> Constructor[_Replica]:
    """Decorate an engine replica's constructor. Its arguments are the configuration, the handles of the ingest and the
    monitor, and its group.

    A failure is logged where ``serve run`` shows it, with the errors of vLLM's own processes, and reported to the
    ingest. It is raised again with the same note for Serve's status.
    """

    @functools.wraps(init)
    async def constructor(
        self: _Replica,
        config: ServiceConfig,
        ingest: DeploymentHandle,
        monitor: DeploymentHandle,
        group: str | None = None,
    ) -> None:
        with collected_errors() as errors:
            try:
                await init(self, config, ingest, monitor, group)
            except Exception as error:
                reason = reason_of(error)
                if (root := errors.first()) is not None:
                    reason = f"{root} ({reason})"
                    error.add_note(root)
                replica_id = serve.get_replica_context().replica_id.unique_id
                logger.error("engine replica %s could not start: %s", replica_id, reason)
                await report_failed_start(replica_id, ingest_client(ingest), reason, group)
                raise

    return constructor


async def report_failed_start(replica_id: str, ingest: IngestCalls, reason: str, group: str | None) -> None:
    """Report a failed start to the ingest. If the ingest does not answer, only Serve's status has the reason."""
    sequence = next(REPORTS)
    status = ReplicaStatus(
        replica_id=replica_id, group=group, sequence=sequence, version=None, state="failed", error=reason
    )
    try:
        async with asyncio.timeout(_LAST_WORD_S):
            await ingest.report(status)
    except (RolloutServiceError, TimeoutError) as error:
        logger.warning("could not tell the ingest why this replica did not start: %s", error)


async def wait_until_awake(ingest: IngestCalls) -> None:
    """Return once the engines are not asleep."""
    while not await ingest.until_awake():
        logger.info("the engines are asleep, and this one is started when they wake")


class StartupHeartbeat:
    """Reports to the ingest every ``period_s`` seconds from its own thread, until the ``with`` block ends."""

    def __init__(self, replica_id: str, ingest: DeploymentHandle, period_s: float, group: str | None = None) -> None:
        self._replica_id, self._group = replica_id, group
        self.status: Callable[[], ReplicaStatus] = self._starting_status
        """Returns the status to report."""
        self._waits_for: str | None = None
        self._takes_memory = False
        self._ingest, self._period_s = ingest, period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="announce", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def start_over(self) -> None:
        """Report ``starting`` again, because another engine replaces the first."""
        self.status = self._starting_status

    def waits_for(self, reason: str | None) -> None:
        """Report why no engine is started yet. None: the start continues."""
        self._waits_for = reason

    async def take_memory(self, ingest: IngestCalls) -> None:
        """Return when an engine may allocate GPU memory: not while the others sleep.

        The report comes before the question, so that a sleep that is ordered later waits for this engine.
        """
        while True:
            self._takes_memory = True
            await ingest.report(self.status())
            if await ingest.until_awake():
                return
            self._takes_memory = False
            await ingest.report(self.status())
            await wait_until_awake(ingest)

    def _starting_status(self) -> ReplicaStatus:
        return ReplicaStatus(
            replica_id=self._replica_id,
            group=self._group,
            sequence=next(REPORTS),
            version=None,
            state="starting",
            takes_memory=self._takes_memory,
            error=self._waits_for,
        )

    def _report(self) -> None:
        while not self._ended.is_set():
            try:
                report_from_thread(self._ingest, self.status(), timeout_s=self._period_s)
            except (RolloutServiceError, TimeoutError) as error:
                logger.info("could not tell the ingest that this replica starts: %s", error)
            self._ended.wait(self._period_s)
