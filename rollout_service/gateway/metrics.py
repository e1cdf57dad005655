"""``GET /metrics``: the service's state for Prometheus. Open to everyone; see docs/metrics.md."""

import asyncio

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.mismatch import table_or_none
from rollout_service.gateway.routes import OpenRoute
from rollout_service.metrics.exposition import exposition

router = APIRouter(tags=["metrics"], route_class=OpenRoute)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(services: Here) -> Response:
    """Return the metrics of the whole service. Ray's agents export the counters of each process on their metrics
    ports."""
    state, mismatch = await asyncio.gather(services.ingest.state(), table_or_none(services))
    return Response(exposition(state, mismatch.rows, mismatch.truncated), media_type=CONTENT_TYPE_PLAIN_0_0_4)
