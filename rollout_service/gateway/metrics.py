"""``GET /metrics``: the state of the whole for Prometheus, open to everyone; docs/metrics.md."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from rollout_service.gateway.mismatch import measured
from rollout_service.gateway.services import Open, call
from rollout_service.metrics.exposition import exposition

router = APIRouter(tags=["metrics"])


@router.get("/metrics")
async def metrics(services: Open) -> Response:
    """What one process knows exactly; what each process counts is at the metrics ports of Ray's agents."""
    state = await call(services.ingest.state.remote())
    return Response(exposition(state, await measured(services)), media_type=CONTENT_TYPE_PLAIN_0_0_4)
