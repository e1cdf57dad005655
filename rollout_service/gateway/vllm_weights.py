"""vLLM's weight-transfer routes, and those that its trainers ask beside them. All need authorization.

For the trainers that drive vLLM by these: TRL 1.16 (``trl/generation/vllm_client.py``, ``experimental/async_grpo``),
SkyRL 0.4.0 (``weight_sync/control_plane.py``) and vLLM 0.32's own ``HTTPVLLMWeightSyncClient``. Paths, bodies and
replies are vLLM's: ``entrypoints/rl/online/api_router.py`` and ``entrypoints/serve/dev``. What happens behind them:
``ingest/weight_transfer.py``. ``POST /update_weights`` and ``GET /server_info`` are in files of their own: other
servers have routes of these names.

None answers 503 or 500 once a trainer broadcasts, because TRL sends those again: what the ingest cannot answer any more
is 409 there.
"""

from typing import Literal

from fastapi import APIRouter

from rollout_service.errors import (
    CommitTimeout,
    InsufficientStorage,
    InvalidManifest,
    InvalidRequest,
    NotFound,
    NotReady,
    QuantizationError,
    VersionConflict,
    WeightTransferFailed,
)
from rollout_service.gateway.dependencies import Here, Services
from rollout_service.gateway.readiness import known_fleet
from rollout_service.gateway.routes import GuardedRoute
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.fleet import Fleet
from rollout_service.protocol.weight_transfer import FinishUpdate, StartUpdate, TransferInit
from rollout_service.web.errors import documented

router = APIRouter(tags=["weights"], route_class=GuardedRoute)


class InitTransfer(Frozen):
    """Body of ``POST /init_weight_transfer_engine``."""

    init_info: TransferInit


class ResetPrefixCache(Frozen):
    """Body of ``POST /reset_prefix_cache`` as SkyRL sends it; vLLM takes these as query parameters."""

    reset_running_requests: bool = False
    reset_external: bool = False


class CheckWeights(Frozen):
    """Body of ``POST /weight_checker``."""

    action: Literal["checksum", "compare", "reset"]
    baseline: dict[str, str] | None = None


@router.post("/init_weight_transfer_engine", responses=documented(InvalidRequest, WeightTransferFailed))
async def init_weight_transfer_engine(body: InitTransfer, services: Here) -> dict[str, str]:
    """Join a trainer's group as one rank; answers when the group is there."""
    await services.ingest.init_weight_transfer(body.init_info)
    return {"message": "Weight transfer initialized"}


@router.post("/start_weight_update", responses=documented(InvalidRequest, WeightTransferFailed, InsufficientStorage))
async def start_weight_update(services: Here, body: StartUpdate | None = None) -> dict[str, str]:
    """Begin a version."""
    await services.ingest.start_weight_update()
    return {"message": "Weight update started"}


@router.post("/start_draft_weight_update", responses=documented(InvalidRequest))
async def start_draft_weight_update(services: Here) -> dict[str, str]:
    """Refused: no engine here has a draft model."""
    raise InvalidRequest(
        "POST /start_draft_weight_update is not implemented: engines here have no draft model for speculative "
        "decoding; POST /start_weight_update updates the model that is served"
    )


async def update_from_broadcast(update_info: object, services: Services) -> dict[str, str]:
    """What ``POST /update_weights`` does with ``update_info``."""
    try:
        await services.ingest.update_weights(update_info)
    except NotReady as error:
        raise _not_again(error) from error
    return {"message": "Weights updated"}


@router.post(
    "/finish_weight_update",
    responses=documented(
        InvalidRequest,
        InvalidManifest,
        QuantizationError,
        NotFound,
        VersionConflict,
        WeightTransferFailed,
        CommitTimeout,
        InsufficientStorage,
    ),
)
async def finish_weight_update(services: Here, body: FinishUpdate | None = None) -> dict[str, str]:
    """Commit what was broadcast; answers when every live replica serves it, and says which version it became."""
    try:
        status = await services.ingest.finish_weight_update(None if body is None else body.weight_version)
    except NotReady as error:
        raise _not_again(error) from error
    return {"message": "Weight update finished", "weight_version": str(status.version)}


@router.post("/shutdown_weight_transfer_engine")
async def shutdown_weight_transfer_engine(services: Here) -> dict[str, str]:
    """Leave the trainer's group, and drop what was not finished."""
    await services.ingest.shutdown_weight_transfer()
    return {"message": "Weight transfer shut down"}


@router.get("/get_world_size", responses=documented(InvalidRequest))
async def get_world_size(services: Here, include_dp: bool = True) -> dict[str, int]:
    """How many ranks of a trainer's group are the service's: one, however many engines there are."""
    return {"world_size": 1}


async def vllm_server_info(services: Services) -> dict[str, object]:
    """What trainers read of vLLM's configuration, and where the weight transfer stands: ``server_info.py``."""
    transfer = await services.ingest.weight_transfer()
    model = {
        "model": services.name,
        "served_model_name": services.name,
        "dtype": "torch.bfloat16",
        "max_model_len": services.max_model_len,
        "logprobs_mode": "processed_logprobs",
    }
    vllm_config = {
        "model_config": model,
        "weight_transfer_config": {"backend": transfer.backend},
        "lora_config": None,
        # as a trainer sees the service: one server, whose replicas it does not reach one by one
        "parallel_config": {"world_size": 1, "data_parallel_size": 1},
    }
    return {
        "vllm_config": vllm_config,
        "vllm_env": {},
        "system_env": {},
        "weight_transfer": transfer.model_dump(mode="json"),
    }


@router.get("/weight_info")
async def weight_info(services: Here) -> dict[str, str]:
    """The version that every live replica serves, or a newer one."""
    fleet = await known_fleet(services.ingest, services.not_running)
    return {"weight_version": str(min(_served(fleet), default=fleet.latest_version))}


@router.post("/reset_prefix_cache", responses=documented(InvalidRequest))
async def reset_prefix_cache(
    services: Here,
    body: ResetPrefixCache | None = None,
    reset_running_requests: bool = False,
    reset_external: bool = False,
) -> dict[str, bool]:
    """Whether no replica has an entry of other weights than the newest version's, running requests' included.

    Each has dropped its whole cache when it loaded the version that it serves, and recomputes that of running requests.
    """
    if reset_external or (body is not None and body.reset_external):
        raise InvalidRequest("reset_external is not implemented: engines here have no external prefix cache")
    fleet = await known_fleet(services.ingest, services.not_running)
    return {"success": all(version == fleet.latest_version for version in _served(fleet))}


@router.post("/weight_checker", responses=documented(InvalidRequest, WeightTransferFailed))
async def weight_checker(body: CheckWeights, services: Here) -> dict[str, object]:
    """xxh3-128 of each tensor that every live replica has loaded, or how they differ from a ``baseline`` of these.

    They are those of the version's manifest, against which a replica checks the bytes that it loads.
    """
    if body.action == "reset":
        raise InvalidRequest("weight_checker: reset is not implemented: weights change by a new version alone")
    if body.action == "compare" and body.baseline is None:
        raise InvalidRequest("weight_checker: compare needs a baseline: the checksums of another request")
    fleet = await known_fleet(services.ingest, services.not_running)
    found = await services.ingest.tensor_digests()
    if behind := sorted({*_served(fleet)} - {found.version}):
        raise WeightTransferFailed(
            f"replicas serve the versions {behind} beside {found.version}: ask again when all serve the newest",
            {"versions": behind, "latest_version": found.version},
        )
    if body.baseline is None or body.action == "checksum":
        return {"checksums": found.digests}
    names = found.digests.keys() | body.baseline.keys()
    mismatches = sorted(name for name in names if found.digests.get(name) != body.baseline.get(name))
    return {"match": not mismatches, "mismatches": mismatches}


def _served(fleet: Fleet) -> list[int]:
    return [replica.version for replica in fleet.replicas if replica.version is not None]


def _not_again(error: NotReady) -> WeightTransferFailed:
    return WeightTransferFailed(
        f"{error.message}. A broadcast cannot be received again: POST /init_weight_transfer_engine", error.detail
    )
