"""``/v1/mismatch``: trainers report their logprobs and read the mismatch with the engines. Needs authorization."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Request

from rollout_service.errors import InvalidRequest, NotReady, RolloutServiceError
from rollout_service.gateway.dependencies import Here, Services
from rollout_service.gateway.routes import GuardedRoute, body_of, read_body
from rollout_service.protocol.base import WeightVersion
from rollout_service.protocol.mismatch import REPORT_BYTES, MismatchReceipt, MismatchReport, MismatchTable
from rollout_service.protocol.weights import WeightStatus
from rollout_service.web.errors import documented

router = APIRouter(prefix="/v1/mismatch", tags=["mismatch"], route_class=GuardedRoute)
logger = logging.getLogger(__name__)
ANSWER_S = 60.0
SUSPICIONS_S = 2.0
"""Maximum wait for the monitor in seconds. After it, versions are returned without the monitor's data."""
_Reply = TypeVar("_Reply")


@router.post("", responses=documented(InvalidRequest), openapi_extra=body_of(MismatchReport))
async def report(request: Request, services: Here) -> MismatchReceipt:
    """Count a ``MismatchReport``. The monitor's process parses the JSON, because parsing here would delay rollouts."""
    body = await read_body(request, REPORT_BYTES)
    return await _answer(services.monitor.report(body), ANSWER_S)


@router.get("", responses=documented(InvalidRequest))
async def table(
    services: Here,
    version: Annotated[WeightVersion | None, Query()] = None,
    replica: str | None = None,
    adapter: str | None = None,
) -> MismatchTable:
    """Return the statistics per version, replica and adapter, and merged over replicas.

    ``adapter``: only of one, as ``run-a`` or ``run-a@3``.
    """
    return await _answer(services.monitor.table(version, replica, adapter), ANSWER_S)


async def with_suspicions(versions: Sequence[WeightStatus], services: Services) -> tuple[WeightStatus, ...]:
    """Return ``versions`` with the monitor's suspicions, or unchanged if the monitor does not answer."""
    suspicions = await _answer_if_any(services.monitor.suspicions(), "versions are shown without what is suspect")
    if suspicions is None:
        return tuple(versions)
    return tuple(status.model_copy(update={"suspect": suspicions.get(status.version, ())}) for status in versions)


async def table_or_none(services: Services) -> MismatchTable:
    """Return the complete mismatch table, or an empty one if the monitor does not answer."""
    known = await _answer_if_any(services.monitor.per_replica(), "metrics are shown without the mismatch")
    return known or MismatchTable(rows=(), versions=())


async def _answer_if_any(response: Awaitable[_Reply], meanwhile: str) -> _Reply | None:
    try:
        return await _answer(response, SUSPICIONS_S)
    except RolloutServiceError as error:
        logger.warning("%s: %s", meanwhile, error)
        return None


async def _answer(response: Awaitable[_Reply], timeout_s: float) -> _Reply:
    try:
        async with asyncio.timeout(timeout_s):
            return await response
    except TimeoutError as error:
        raise NotReady(f"the monitor did not answer within {timeout_s:g} s: send it again") from error
