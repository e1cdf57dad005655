"""The control routes: pause, resume and fleet. All need authorization."""

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
    """Pause all current and future replicas until ``/resume``. Requests are queued meanwhile.

    A pause replaces an earlier pause with another mode. Answers 409 if another command arrives before every replica has
    paused.

    ``clear_cache`` exists for compatibility with vLLM; prime-rl and SkyRL send false. The KV cache is always dropped,
    and paused rollouts recompute theirs.
    """
    await services.ingest.set_paused(True, mode, timeout_s)
    return {"status": "paused"}


@router.post("/resume", responses=documented(InvalidRequest, Overtaken, Asleep))
async def resume(services: Here, timeout_s: TimeoutS = 600.0) -> dict[str, str]:
    """Resume all replicas, even if a pause still waits for running rollouts. Answers 409 as ``/pause`` does."""
    await services.ingest.set_paused(False, "keep", timeout_s)
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(services: Here) -> dict[str, bool]:
    """Return true if a pause was requested and every live replica is paused."""
    return {"is_paused": await services.ingest.is_paused()}


@router.get("/v1/fleet")
async def fleet(services: Here) -> Fleet:
    """Return the live replicas and the newest committed version. Answers 503 with the reason if the ingest does not
    reply."""
    return await known_fleet(services.ingest, services.not_running)
