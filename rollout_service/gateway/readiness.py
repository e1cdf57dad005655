"""Readiness of the fleet as the ingest knows it, with the reason if no replica is ready."""

import asyncio
from collections.abc import Callable

from rollout_service.errors import NotReady
from rollout_service.protocol.fleet import FailedStarts, Fleet
from rollout_service.runtime.rpc import IngestCalls

INGEST_ANSWERS_S = 5.0
"""Timeout in seconds. An ingest that cannot start never answers, and the caller should learn the reason soon."""


async def failed_starts(ingest: IngestCalls, not_running: Callable[[], dict[str, str]]) -> FailedStarts | None:
    """Return the failed starts if a replica is ready, or None if no start failed.

    Raises NotReady, with the reason, if no replica is ready.

    Args:
        ingest: the ingest, which knows the fleet.
        not_running: Serve's messages about deployments, see ``fleet/serve_status.py``.
    """
    fleet = await known_fleet(ingest, not_running)
    if any(r.version is not None and r.error is None and r.state != "draining" for r in fleet.unpinned):
        return fleet.failed_starts
    # requested by the trainer, so the service is ready
    if any(replica.state == "asleep" and replica.error is None for replica in fleet.unpinned):
        return fleet.failed_starts
    raise await _not_ready("no engine replica is live", fleet.failed_starts, not_running)


async def known_fleet(ingest: IngestCalls, not_running: Callable[[], dict[str, str]]) -> Fleet:
    """Return the fleet as the ingest knows it. Raises NotReady with Serve's messages if the ingest does not answer."""
    try:
        async with asyncio.timeout(INGEST_ANSWERS_S):
            return await ingest.fleet()
    except (NotReady, TimeoutError) as error:
        why = str(error) or f"the ingest has not answered for {INGEST_ANSWERS_S:g} s"
        raise await _not_ready(why, None, not_running) from error


async def _not_ready(why: str, failed: FailedStarts | None, not_running: Callable[[], dict[str, str]]) -> NotReady:
    if failed is not None and not failed.over:
        starts = "the start of a replica has failed" if failed.tries == 1 else f"{failed.tries} starts have failed"
        message = f"{why}: {starts}, the first ({failed.first.replica_id}) with: {failed.first.reason}"
        return NotReady(message, {"failed_starts": failed.model_dump(mode="json")})
    said = await asyncio.to_thread(not_running)
    if not said:
        return NotReady(why)
    lines = [f"{name or 'the application'}: {message}" for name, message in sorted(said.items())]
    return NotReady(f"{why}; Serve says of {'; '.join(lines)}", {"not_running": said})
