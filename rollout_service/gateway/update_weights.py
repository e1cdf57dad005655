"""``POST /update_weights``, which two kinds of clients call with different bodies.

    {"weight_dir": "…/broadcasts/step_N"}   prime-rl's admin plane (559b447, ``utils/client.py``)
    {"update_info": …}                      vLLM's weight transfer in four phases

prime-rl calls ``/pause?mode=keep&clear_cache=false``, this route, and ``/resume``. It repeats a call that failed with a
5xx up to ten times, and treats any other failure as final.
"""

from typing import Any, Self

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, model_validator

from rollout_service.errors import (
    CommitTimeout,
    InvalidManifest,
    InvalidRequest,
    NotFound,
    QuantizationError,
    RolloutServiceError,
    VersionConflict,
    WeightTransferFailed,
)
from rollout_service.gateway.dependencies import Here, Services
from rollout_service.gateway.folder_updates import FolderPath, is_worth_repeating, update_from_folder
from rollout_service.gateway.routes import GuardedRoute
from rollout_service.gateway.vllm_weights import update_from_broadcast
from rollout_service.protocol.base import Frozen
from rollout_service.web.errors import ErrorResponse, documented

router = APIRouter(tags=["trainers"], route_class=GuardedRoute)


class UpdateWeights(Frozen):
    """The body of either client."""

    weight_dir: FolderPath | None = None
    """A Hugging Face folder of safetensors below ``weights.source_roots``."""
    update_info: Any = None
    """``TensorsToCome``: the tensors that a trainer will broadcast, see ``vllm_weights.py``."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("give either weight_dir, as prime-rl does, or update_info, as vLLM's clients do")
        return self


class Updated(BaseModel):
    """The reply, sent once every live replica serves the folder's version."""

    status: str
    version: int


class Received(BaseModel):
    """The reply, sent once all announced tensors were received."""

    message: str


@router.post(
    "/update_weights",
    responses={
        200: {"model": Updated | Received},
        **documented(
            InvalidRequest,
            InvalidManifest,
            QuantizationError,
            NotFound,
            VersionConflict,
            WeightTransferFailed,
            CommitTimeout,
        ),
    },
)
async def update_weights(body: UpdateWeights, services: Here) -> Response:
    """Serve the weights in a folder, or receive the tensors that a trainer broadcasts.

    Answers when every live replica serves the folder's weights, or when all tensors were received. A repeated call gets
    the same answer.
    """
    if "update_info" in body.model_fields_set:
        return JSONResponse(await update_from_broadcast(body.update_info, services))
    return await _from_folder(body.weight_dir, services)


async def _from_folder(weight_dir: str | None, services: Services) -> Response:
    if weight_dir is None:
        raise InvalidRequest(
            "weight_dir is null: prime-rl would send weights over NCCL or NIXL, which are not implemented; set "
            'weight_broadcast.type = "filesystem" in prime-rl'
        )
    try:
        status = await update_from_folder(services, weight_dir)
    except RolloutServiceError as error:
        if error.http_status < 500 or is_worth_repeating(error):
            raise
        return ErrorResponse(error.to_wire(), status_code=VersionConflict.http_status)
    return JSONResponse({"status": "ok", "version": status.version})
