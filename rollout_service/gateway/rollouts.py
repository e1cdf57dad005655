"""``/v1/rollouts``: collect or delete rollouts that were started with ``detach``."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import JSONResponse

from rollout_service.errors import NotFound
from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.prompts import DATA_ERRORS
from rollout_service.gateway.routes import OpenRoute
from rollout_service.protocol.generate import DetachedRollout, GenerateReply
from rollout_service.web.errors import documented

router = APIRouter(prefix="/v1/rollouts", tags=["generate"], route_class=OpenRoute)
RolloutId = Annotated[str, Path(min_length=1, max_length=256)]
MOST_WAIT_S = 60.0


@router.get(
    "/{rollout_id:path}",
    response_model=dict[str, object],
    responses={200: {"model": GenerateReply}, 202: {"model": DetachedRollout}, **DATA_ERRORS},
)
async def collect(
    rollout_id: RolloutId, services: Here, wait_s: Annotated[float, Query(ge=0, le=MOST_WAIT_S)] = 30.0
) -> dict[str, object] | Response:
    """Return the reply of a detached rollout in the format of ``/inference/v1/generate``, or 202 while it is running.

    A failed rollout answers with its error.
    """
    reply = await services.detached.collect(rollout_id, wait_s)
    return JSONResponse({"id": rollout_id}, status_code=202) if reply is None else reply


@router.delete("/{rollout_id:path}", status_code=204, responses=documented(NotFound))
async def delete(rollout_id: RolloutId, services: Here) -> None:
    """Cancel the rollout if it is running, and delete it."""
    services.detached.delete(rollout_id)
