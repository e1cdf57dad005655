"""The routes by which Tinker's SDK samples: ``create_sampling_client``, ``sample`` and ``compute_logprobs``.

The SDK starts a sample, and polls for its result. The gateway keeps samples in memory. The id of a sampling session has
all that the session is. Training is refused by name.
"""

import asyncio
import uuid

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from rollout_service.errors import InvalidRequest, NotFound, SampleGone, TooManySamples
from rollout_service.gateway.dependencies import Here, Services
from rollout_service.gateway.prompts import DATA_ERRORS, find_adapter, model_and_adapter, roll_out
from rollout_service.gateway.routes import OpenRoute, PromptsRoute
from rollout_service.gateway.score import check_targets
from rollout_service.gateway.tinker_reply import sample_response
from rollout_service.gateway.tinker_samples import Samples
from rollout_service.protocol.generate import RolloutOptions
from rollout_service.protocol.tinker import (
    PATH,
    CreateSamplingSession,
    Id,
    Ignored,
    RetrieveFuture,
    Sample,
    adapter_of,
)
from rollout_service.web.errors import documented

router = APIRouter(prefix="/api/v1", tags=["tinker"], route_class=OpenRoute)

_NO_TRAINING = (
    "training is not implemented here: train with your own loop, and push the adapter with "
    "RolloutClient.push_adapter or POST /v1/load_lora_adapter"
)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answer that the gateway runs."""
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def capabilities(services: Here) -> dict[str, object]:
    """Return the served model's names. None can be trained here."""
    about = {"max_context_length": services.max_model_len, "trainable": False, "sampleable": True}
    return {"supported_models": [{"model_name": name, **about} for name in (services.name, *services.aliases)]}


@router.post("/client/config")
async def config(body: Ignored) -> dict[str, object]:
    """Return no flags: the SDK's defaults hold."""
    return {}


@router.post("/client/dynamic_config")
async def dynamic_config(body: Ignored) -> dict[str, object]:
    """Tell the SDK to cancel abandoned samples."""
    return {"sample_cancel_enabled": True}


@router.post("/create_session", responses=documented(InvalidRequest))
async def create_session(body: Ignored, services: Here) -> dict[str, str]:
    """Return a new session id. Needs ``scaling.gateways: 1``."""
    _samples(services)
    return {"type": "create_session", "session_id": uuid.uuid4().hex}


@router.post("/session_heartbeat")
async def heartbeat(body: Ignored) -> dict[str, str]:
    """Accept a sign of life. Sessions do not end."""
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish(session_id: Id, body: Ignored | None = None) -> dict[str, str]:
    """Accept the end of a session."""
    return {"status": "ok"}


@router.post("/telemetry")
async def telemetry(body: Ignored) -> dict[str, str]:
    """Accept the SDK's telemetry, and drop it."""
    return {"status": "accepted"}


@router.post("/create_sampling_session", responses=documented(InvalidRequest, NotFound))
async def create_sampling_session(body: CreateSamplingSession, services: Here) -> dict[str, str]:
    """Return the id of a sampling session of the served model, or of an adapter as ``model_path: tinker://run-a``."""
    if body.base_model is not None:
        await model_and_adapter(body.base_model, None, services)
    await find_adapter(RolloutOptions(adapter=body.adapter), services)
    return {"type": "create_sampling_session", "sampling_session_id": body.sampler_id()}


def _samples(services: Services) -> Samples:
    if services.samples is None:
        raise InvalidRequest("each of several gateways would know only its own samples: set scaling.gateways to 1")
    return services.samples


@router.get("/samplers/{sampler_id}")
async def sampler(sampler_id: Id, services: Here) -> dict[str, str | None]:
    """Return the model and the adapter of a sampling session."""
    adapter = adapter_of(sampler_id)
    path = None if adapter is None else PATH + adapter
    return {"sampler_id": sampler_id, "base_model": services.name, "model_path": path}


async def asample(body: Sample, services: Here) -> dict[str, object]:
    """Start a sample. Its errors are those of its result."""
    _samples(services).start(body.request_id, lambda: _sample(body, services))
    ids = [f"{body.request_id}~{index}" for index in range(body.num_samples)]
    return {"request_id": body.request_id, "sample_sequence_ids": ids}


async def _sample(body: Sample, services: Services) -> bytes:
    scoring = body.scoring()
    if scoring is not None and scoring.target_token_ids is not None:
        check_targets("target_prompt_logprobs", scoring.target_token_ids, scoring.start, services)
    options = RolloutOptions(adapter=adapter_of(body.sampling_session_id))
    rollout = await roll_out(body.prompt.token_ids, body.sampling(), services, options, scoring=scoring)
    return await asyncio.to_thread(sample_response, rollout, body)


router.add_api_route(
    "/asample",
    asample,
    methods=["POST"],
    responses=DATA_ERRORS | documented(TooManySamples),
    route_class_override=PromptsRoute,
)


@router.post("/retrieve_future", responses=documented(SampleGone), response_class=Response)
async def retrieve_future(body: RetrieveFuture, services: Here) -> Response:
    """Return a sample as protobuf or its error as JSON; 408 after a while, to poll again."""
    result = await _samples(services).result(body.request_id)
    if result is None:
        again = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return JSONResponse(again, status_code=408)
    if isinstance(result, bytes):
        return Response(result, media_type="application/x-protobuf")
    return JSONResponse(result)


@router.post("/cancel_future", status_code=204)
async def cancel_future(body: RetrieveFuture, services: Here) -> None:
    """Stop a sample."""
    _samples(services).cancel(body.request_id)


async def refuse(body: Ignored | None = None) -> dict[str, str]:
    """Refuse the request: training is not implemented."""
    raise InvalidRequest(_NO_TRAINING)


for _name in (
    *("create_model", "get_info", "forward", "forward_backward", "optim_step", "unload_model", "create_custom_loss"),
    *("save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights", "copy_weights"),
    "weights_info",
):
    router.post(f"/{_name}", responses=documented(InvalidRequest))(refuse)
