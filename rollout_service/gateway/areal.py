"""The control routes of AReaL's vLLM backend (cbff54d ``engine/vllm_remote.py``, ``vllm_ext/areal_vllm_server.py``).

AReaL sends rollouts to ``/v1/completions``. It labels each segment of a completion with its own version count at the
time of the request. A completion that continued across an update would get a wrong label. This pause therefore returns
aborted completions to their callers, on every data route. AReaL then sends the prompt and the tokens again.
"""

from fastapi import APIRouter

from rollout_service.errors import Asleep, CommitTimeout, InvalidRequest, MalformedRequest, Overtaken
from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.sglang.replies import ControlRoute, Success
from rollout_service.gateway.update_weights import FolderPath, update_from_folder
from rollout_service.protocol.base import Frozen
from rollout_service.web.errors import documented

router = APIRouter(tags=["areal"], route_class=ControlRoute)
_ANSWERS = {200: {"model": Success}, **documented(MalformedRequest, Overtaken, Asleep)}


class Nothing(Frozen):
    """An empty JSON object."""


class UpdateWeights(Frozen):
    """A Hugging Face folder of safetensors below ``weights.source_roots``."""

    model_path: FolderPath


@router.post("/areal_pause_generation", responses=_ANSWERS)
async def pause_generation(services: Here, body: Nothing | None = None) -> Success:
    """Return every running completion with its tokens so far. Later requests wait for
    ``/areal_continue_generation``."""
    await services.ingest.set_paused(True, "abort", ControlRoute.waits_s, "return")
    return Success(message="generation is paused")


@router.post("/areal_continue_generation", responses=_ANSWERS)
async def continue_generation(services: Here, body: Nothing | None = None) -> Success:
    """End the pause."""
    await services.ingest.set_paused(False, "keep", ControlRoute.waits_s)
    return Success(message="generation goes on")


@router.post(
    "/areal_update_weights", responses={200: {"model": Success}, **documented(MalformedRequest, CommitTimeout)}
)
async def update_weights(body: UpdateWeights, services: Here) -> Success:
    """Serve the weights in a folder. Answers when every live replica serves them, or with 400 if they are unusable."""
    status = await update_from_folder(services, body.model_path)
    return Success(message=f"every replica serves version {status.version}")


async def refuse(body: dict[str, object] | None = None) -> Success:
    """Refuse the request with 400: not implemented."""
    raise InvalidRequest(
        "weights over NCCL are not implemented under AReaL's routes: set weight_update_mode: disk there, which sends "
        "/areal_update_weights, or /v1/load_lora_adapter for adapters"
    )


for _route in (
    "/areal_init_weights_update_group",
    "/areal_set_update_weight_meta",
    "/areal_update_weights_xccl",
    "/areal_set_update_weight_meta_lora",
    "/areal_update_weights_lora_xccl",
):
    router.post(_route, responses=documented(MalformedRequest))(refuse)
