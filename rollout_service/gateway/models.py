"""``GET /v1/models`` and ``GET /health``: open to everyone."""

import time
from typing import Any

from fastapi import APIRouter

from rollout_service.errors import NotReady
from rollout_service.gateway.routes import OpenRoute
from rollout_service.gateway.services import Here, call

router = APIRouter(tags=["models"], route_class=OpenRoute)
_STARTED = int(time.time())


@router.get("/v1/models")
async def models(services: Here) -> dict[str, Any]:
    """OpenAI's list: the one served model."""
    model = {
        "id": services.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "rollout-service",
        "root": services.name,
        "max_model_len": services.max_model_len,
    }
    return {"object": "list", "data": [model]}


@router.get("/health")
async def health(services: Here) -> dict[str, str]:
    """200 while a replica can serve; 503 otherwise."""
    fleet = await call(services.ingest.fleet.remote())
    if not any(replica.version is not None and replica.error is None for replica in fleet.replicas):
        raise NotReady("no engine replica is live")
    return {"status": "ok"}
