"""``POST /update_weights``, and weight updates from a folder, which several APIs share.

Two kinds of clients call the route, with different bodies:

    {"weight_dir": "…/broadcasts/step_N"}   prime-rl's admin plane (559b447, ``utils/client.py``)
    {"update_info": …}                      vLLM's weight transfer in four phases, see ``vllm_weights.py``

prime-rl calls ``/pause?mode=keep&clear_cache=false``, this route, and ``/resume``. It repeats a call that failed with a
5xx up to ten times, and treats any other failure as final. slime 624b824 (``sglang_engine.py``) and AReaL cbff54d
(``remote_inf_engine.py``) send a folder's path to their own routes.

A successful reply to an update from a folder means that every live replica serves its weights and nothing reads the
folder any more. The trainer may then delete it.
"""

import asyncio
import re
from pathlib import Path
from typing import Annotated, Any, Self

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, model_validator

from rollout_service.errors import (
    CommitTimeout,
    DeploymentFailed,
    InvalidManifest,
    InvalidRequest,
    NotFound,
    NotReady,
    QuantizationError,
    RolloutServiceError,
    VersionConflict,
    WeightTransferFailed,
)
from rollout_service.gateway.dependencies import Here, Services
from rollout_service.gateway.routes import GuardedRoute
from rollout_service.protocol.base import Frozen, is_label
from rollout_service.protocol.fleet import PauseMode
from rollout_service.protocol.upload import CommitUpload
from rollout_service.protocol.weights import WeightStatus
from rollout_service.web.errors import ErrorResponse, documented

router = APIRouter(tags=["trainers"], route_class=GuardedRoute)
COMMIT_ERRORS = (
    *(InvalidRequest, InvalidManifest, QuantizationError, NotFound, VersionConflict, WeightTransferFailed),
    CommitTimeout,
)
"""Errors of ``/update_weights``, and of the phase that commits a broadcast."""
UPDATE_S = 600.0
"""Maximum wait for a version in seconds. prime-rl waits 720 s for the reply, and then repeats the call."""
FolderPath = Annotated[str, Field(min_length=1, max_length=4096)]
_NUMBERED = re.compile(r"(?:.*_)?step_(\d{1,15})|weight(?:_update)?_v(\d{1,15})")


def number_of(folder: str) -> int | None:
    """Return the version number in a folder's name, or None if the name has none.

    Recognizes ``step_7`` (prime-rl), ``weight_v000007`` (slime) and ``weight_update_v7`` (AReaL).
    """
    found = _NUMBERED.fullmatch(Path(folder).name)
    return None if found is None else int(found[1] or found[2])


async def update_from_folder(
    services: Services,
    folder: str,
    *,
    number: int | None = None,
    label: str | None = None,
    mode: PauseMode = "keep",
    timeout_s: float = UPDATE_S,
) -> WeightStatus:
    """Make the weights in ``folder`` the next version, and return once every live replica serves it.

    A repeated call with the same folder and files joins the running update. If that version is already the newest, the
    call returns at once. ``Uploads.begin_folder`` explains how repetition is detected, even by another gateway or after
    a restart.

    Args:
        folder: absolute path below ``weights.source_roots``, as seen on the ingest's node.
        number: the trainer's version number. None: taken from the folder's name, if it has one. If the number is not
            newer than the newest version, the next free number is used. A trainer may therefore return to an earlier
            checkpoint.
        label: the label of the version. None: the folder's name, if it is a valid label.
        mode: the fate of running rollouts.
        timeout_s: maximum seconds for the whole update.

    Raises:
        InvalidRequest, Forbidden, NotFound: The folder is unusable.
        InvalidManifest, QuantizationError: The weights are unusable.
        InsufficientStorage, VersionConflict: The version cannot be stored.
        CommitTimeout: The update continues; the same call waits for it again.
    """
    if not Path(folder).is_absolute():
        raise InvalidRequest(f"{folder!r} is a relative path, and the ingest runs elsewhere: send an absolute one")
    number = number_of(folder) if number is None else number
    name = Path(folder).name
    label = name if label is None and is_label(name) else label
    request = CommitUpload(mode=mode, wait="all", timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            return await services.ingest.push_folder(Path(folder), request, number, label)
    except TimeoutError as error:
        raise CommitTimeout(
            f"{folder} is still being read and converted after {timeout_s:g} s, which goes on: send the same call again"
        ) from error


def is_worth_repeating(error: RolloutServiceError) -> bool:
    """Return True if the same call may succeed when repeated. Some clients repeat a call after any 5xx."""
    return isinstance(error, NotReady | CommitTimeout) and not isinstance(error, DeploymentFailed)


def not_again(error: NotReady) -> WeightTransferFailed:
    """Return an error that no trainer answers with the same call: a broadcast cannot be received twice."""
    return WeightTransferFailed(
        f"{error.message}. A broadcast cannot be received again: POST /init_weight_transfer_engine", error.detail
    )


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


@router.post("/update_weights", responses={200: {"model": Updated | Received}, **documented(*COMMIT_ERRORS)})
async def update_weights(body: UpdateWeights, services: Here) -> Response:
    """Serve the weights in a folder, or receive the tensors that a trainer broadcasts.

    Answers when every live replica serves the folder's weights, or when all tensors were received. A repeated call gets
    the same answer.
    """
    if "update_info" in body.model_fields_set:
        try:
            await services.ingest.update_weights(body.update_info)
        except NotReady as error:
            raise not_again(error) from error
        return JSONResponse({"message": "Weights updated"})
    if body.weight_dir is None:
        raise InvalidRequest(
            "weight_dir is null: prime-rl would send weights over NCCL or NIXL, which are not implemented; set "
            'weight_broadcast.type = "filesystem" in prime-rl'
        )
    try:
        status = await update_from_folder(services, body.weight_dir)
    except RolloutServiceError as error:
        if error.http_status < 500 or is_worth_repeating(error):
            raise
        return ErrorResponse(error.to_wire(), status_code=VersionConflict.http_status)
    return JSONResponse({"status": "ok", "version": status.version})
