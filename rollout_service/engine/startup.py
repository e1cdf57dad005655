"""A replica's start: heartbeats before its engine exists, the wait for free GPU memory, and the reason of a failure."""

import asyncio
import itertools
import logging
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self

from ray import serve
from ray.serve.handle import DeploymentHandle

from rollout_service.engine.processes import collected_errors, reason_of
from rollout_service.errors import RolloutServiceError
from rollout_service.gpu import nvidia_smi
from rollout_service.protocol.fleet import ReplicaState, ReplicaStatus
from rollout_service.runtime.rpc import IngestCalls, ingest_client, report_from_thread, until_answered

logger = logging.getLogger(__name__)

REPORTS = itertools.count()
"""Counter of this process's reports, so that a delayed report is not taken for the newest."""

_LAST_WORD_S = 5.0
"""Timeout in seconds for reporting a failed start, because Serve starts another replica only after this one ends."""
POLL_S = 5.0
_ALONE_S = 15.0
"""Minimum wait in seconds if no other replica serves. An engine that has just ended frees its memory earlier."""


@asynccontextmanager
async def report_failed_start(ingest: DeploymentHandle, group: str | None) -> AsyncIterator[None]:
    """Surround an engine replica's start. ``group``: the replica's.

    A failure is logged where ``serve run`` shows it, with the errors of vLLM's own processes, and reported to the
    ingest. It is raised again with the same note for Serve's status.
    """
    with collected_errors() as errors:
        try:
            yield
        except Exception as error:
            reason = reason_of(error)
            if root := next(iter(errors()), None):
                reason = f"{root} ({reason})"
                error.add_note(root)
            replica_id = serve.get_replica_context().replica_id.unique_id
            logger.error("engine replica %s could not start: %s", replica_id, reason)
            status = _status(replica_id, group, "failed", reason)
            try:
                async with asyncio.timeout(_LAST_WORD_S):
                    await ingest_client(ingest).report(status)
            except (RolloutServiceError, TimeoutError) as unsaid:  # only Serve's status has the reason then
                logger.warning("could not tell the ingest why this replica did not start: %s", unsaid)
            raise


def _status(replica_id: str, group: str | None, state: ReplicaState, error: str | None) -> ReplicaStatus:
    sequence = next(REPORTS)
    return ReplicaStatus(replica_id=replica_id, group=group, sequence=sequence, version=None, state=state, error=error)


async def wait_until_awake(ingest: IngestCalls, poll_s: float) -> None:
    """Return once the engines are not asleep."""
    while not await until_answered(ingest.until_awake, poll_s):
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
            await until_answered(lambda: ingest.report(self.status()), self._period_s)
            if await until_answered(ingest.until_awake, self._period_s):
                return
            self._takes_memory = False
            await until_answered(lambda: ingest.report(self.status()), self._period_s)
            await wait_until_awake(ingest, self._period_s)

    def _starting_status(self) -> ReplicaStatus:
        status = _status(self._replica_id, self._group, "starting", self._waits_for)
        return status.model_copy(update={"takes_memory": self._takes_memory})

    def _report(self) -> None:
        while not self._ended.is_set():
            try:
                report_from_thread(self._ingest, self.status(), timeout_s=self._period_s)
            except (RolloutServiceError, TimeoutError) as error:
                logger.info("could not tell the ingest that this replica starts: %s", error)
            self._ended.wait(self._period_s)


class GpuTaken(RuntimeError):
    """Raised when another process holds the memory of a GPU that Ray assigned to this replica."""


async def wait_for_free_gpus(
    devices: Sequence[str],
    share: float,
    tell: Callable[[str | None], None],
    others_serve: Callable[[], Awaitable[bool]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Wait until each GPU of ``devices`` has the fraction ``share`` of its memory free.

    A waiting replica keeps the GPU reserved in Ray, so that the next replica gets another one. If it failed instead,
    Serve would start replicas forever, possibly on the same GPU.

    Raises GpuTaken if no other replica serves.

    Args:
        devices: GPU ids, as Ray names them.
        share: ``engine.gpu_memory_utilization``.
        tell: called with the reason for the wait, and with None at the end.
        others_serve: returns True if another replica serves.
        sleep: waits for the given seconds.
    """
    waited_s, told = 0.0, False
    while (why := await asyncio.to_thread(why_taken, devices, share)) is not None:
        tell(why)
        if waited_s >= _ALONE_S and not await others_serve():
            advice = "start Ray with a CUDA_VISIBLE_DEVICES without that GPU, or lower engine.gpu_memory_utilization"
            raise GpuTaken(f"{why}: end that process, {advice}")
        if not told:
            logger.warning("no engine is started here until the memory is free: %s", why)
            told = True
        await sleep(POLL_S)
        waited_s += POLL_S
    if told:
        logger.info("the memory of GPU %s is free, and the engine starts", ", ".join(devices))
    tell(None)


def why_taken(devices: Sequence[str], share: float) -> str | None:
    """Return the GPUs with too little free memory and the processes that hold it. None: all have enough."""
    try:
        ours = nvidia_smi.select_gpus(nvidia_smi.gpus(), ",".join(devices)) if devices else ()
        found = nvidia_smi.find_taken(ours, nvidia_smi.holders(), share) if ours else {}
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        logger.warning("it is not known whether the GPU has free memory; vLLM will tell: %s", error)
        return None
    return "; ".join(f"GPU {index}: {why}" for index, why in found.items()) or None
