"""``GET /v1/models`` and ``GET /health``: open to everyone."""

import time

from fastapi import APIRouter

from rollout_service.gateway.control import failed_starts
from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.routes import OpenRoute

router = APIRouter(tags=["models"], route_class=OpenRoute)
_STARTED = int(time.time())


@router.get("/v1/models")
async def models(services: Here) -> dict[str, object]:
    """List the served model under each of its names, and its adapters, in OpenAI's format."""
    adapters = () if services.adapters is None else await services.adapters.names()
    data = [
        {
            "id": name,
            "object": "model",
            "created": _STARTED,
            "owned_by": "rollout-service",
            "root": services.name,
            "max_model_len": services.max_model_len,
        }
        | ({"parent": services.name} if name in adapters else {})
        for name in (services.name, *services.aliases, *adapters)
    ]
    return {"object": "list", "data": data}


@router.get("/health")
async def health(services: Here) -> dict[str, object]:
    """Answer 200 if a replica is ready, else 503 with the reason of the first failed start, if any.

    ``failed_starts`` counts failed starts and has their reasons. It stays in the reply after a later start succeeds.
    """
    failed = await failed_starts(services)
    return {"status": "ok"} if failed is None else {"status": "ok", "failed_starts": failed.model_dump(mode="json")}
