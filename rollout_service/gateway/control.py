"""The control routes: pause, resume, fleet. All need authorization."""

from typing import Annotated

from fastapi import APIRouter, Query

from rollout_service.errors import Asleep, InvalidRequest, Overtaken
from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.readiness import known_fleet
from rollout_service.gateway.routes import GuardedRoute
from rollout_service.protocol.fleet import Fleet, PauseMode
from rollout_service.web.errors import documented

router = APIRouter(tags=["control"], route_class=GuardedRoute)
TimeoutS = Annotated[float, Query(gt=0, allow_inf_nan=False)]


@router.post("/pause", responses=documented(InvalidRequest, Overtaken))
async def pause(
    services: Here, mode: PauseMode = "keep", timeout_s: TimeoutS = 600.0, clear_cache: bool = True
) -> dict[str, str]:
    """Pause every replica, and those that start later, until ``/resume``. Requests queue meanwhile.

    Takes over from a pause with another mode. 409 if something else is asked for before every replica has obeyed.
    ``clear_cache``: vLLM's; the KV cache is dropped in any case, and false, by which prime-rl and SkyRL allow it to be
    kept, changes nothing but that what ran computes it anew.
    """
    await services.ingest.set_paused(True, mode, timeout_s)
    return {"status": "paused"}


@router.post("/resume", responses=documented(InvalidRequest, Overtaken, Asleep))
async def resume(services: Here, timeout_s: TimeoutS = 600.0) -> dict[str, str]:
    """Resume every replica, also while it waits for running rollouts. 409 as for ``/pause``."""
    await services.ingest.set_paused(False, "keep", timeout_s)
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(services: Here) -> dict[str, bool]:
    """True when a pause was asked for and every live replica has obeyed."""
    return {"is_paused": await services.ingest.is_paused()}


@router.get("/v1/fleet")
async def fleet(services: Here) -> Fleet:
    """The live replicas beside the newest committed version. 503 with the reason if the ingest does not answer."""
    return await known_fleet(services.ingest, services.not_running)
