"""vLLM's weight-transfer routes, and other vLLM routes that trainers use with them. All need authorization.

They serve trainers that drive vLLM this way: TRL 1.16 (``trl/generation/vllm_client.py``, ``experimental/async_grpo``),
SkyRL 0.4.0 (``weight_sync/control_plane.py``) and vLLM 0.32's ``HTTPVLLMWeightSyncClient``. Paths, bodies and replies
follow vLLM: ``entrypoints/rl/online/api_router.py`` and ``entrypoints/serve/dev``. ``ingest/weight_transfer.py``
implements them. ``POST /update_weights``, a route of prime-rl, too, is in ``update_weights.py``.

During a broadcast no route answers 503 or 500, because TRL would repeat the call. It answers 409 if the ingest cannot
reply.
"""

from collections.abc import Mapping
from typing import Literal

from fastapi import APIRouter, Request

from rollout_service.config import AdaptersConfig
from rollout_service.errors import InsufficientStorage, InvalidRequest, NotReady, Overtaken, WeightTransferFailed
from rollout_service.gateway.control import known_fleet
from rollout_service.gateway.dependencies import Here, Services
from rollout_service.gateway.routes import GuardedRoute
from rollout_service.gateway.sglang.info import server_info as sglang_server_info
from rollout_service.gateway.update_weights import COMMIT_ERRORS, not_again
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.fleet import Fleet
from rollout_service.protocol.weight_transfer import FinishUpdate, StartUpdate, TransferInit
from rollout_service.protocol.weights import TensorDigests
from rollout_service.web.errors import documented

router = APIRouter(tags=["weights"], route_class=GuardedRoute)
_RESET_S = 600.0
"""Timeout in seconds for dropping the KV cache of every replica."""


class InitTransfer(Frozen):
    """Body of ``POST /init_weight_transfer_engine``."""

    init_info: TransferInit


class ResetPrefixCache(Frozen):
    """Body of ``POST /reset_prefix_cache`` as SkyRL sends it. vLLM takes these fields as query parameters."""

    reset_running_requests: bool = False
    reset_external: bool = False


class CheckWeights(Frozen):
    """Body of ``POST /weight_checker``."""

    action: Literal["checksum", "compare", "reset"]
    baseline: dict[str, str] | None = None


@router.post("/init_weight_transfer_engine", responses=documented(InvalidRequest, WeightTransferFailed))
async def init_weight_transfer_engine(body: InitTransfer, services: Here) -> dict[str, str]:
    """Join a trainer's process group as one rank. Answers when the group exists."""
    await services.ingest.init_weight_transfer(body.init_info)
    return {"message": "Weight transfer initialized"}


@router.post("/start_weight_update", responses=documented(InvalidRequest, WeightTransferFailed, InsufficientStorage))
async def start_weight_update(services: Here, body: StartUpdate | None = None) -> dict[str, str]:
    """Begin a version."""
    await services.ingest.start_weight_update()
    return {"message": "Weight update started"}


@router.post("/start_draft_weight_update", responses=documented(InvalidRequest))
async def start_draft_weight_update(services: Here) -> dict[str, str]:
    """Refuse the request: no engine here has a draft model."""
    raise InvalidRequest(
        "POST /start_draft_weight_update is not implemented: engines here have no draft model for speculative "
        "decoding; POST /start_weight_update updates the model that is served"
    )


@router.post("/finish_weight_update", responses=documented(*COMMIT_ERRORS, InsufficientStorage))
async def finish_weight_update(services: Here, body: FinishUpdate | None = None) -> dict[str, str]:
    """Commit the broadcast tensors. Answers with the new version when every live replica serves it."""
    try:
        status = await services.ingest.finish_weight_update(None if body is None else body.weight_version)
    except NotReady as error:
        raise not_again(error) from error
    return {"message": "Weight update finished", "weight_version": str(status.version)}


@router.post("/shutdown_weight_transfer_engine")
async def shutdown_weight_transfer_engine(services: Here) -> dict[str, str]:
    """Leave the trainer's process group, and drop an unfinished version."""
    await services.ingest.shutdown_weight_transfer()
    return {"message": "Weight transfer shut down"}


@router.post("/init_communicator", responses=documented(InvalidRequest))
async def init_communicator(services: Here, body: dict[str, object] | None = None) -> dict[str, str]:
    """Refuse the request of TRL before 1.11 and of ms-swift: not implemented."""
    raise InvalidRequest(
        "POST /init_communicator is not implemented: TRL before 1.11 and ms-swift send weights by it; use TRL 1.11 or "
        "newer, which has vLLM's weight-transfer routes, or push weights by this service's client"
    )


@router.get("/get_world_size", responses=documented(InvalidRequest))
async def get_world_size(services: Here, include_dp: bool = True) -> dict[str, int]:
    """Return the service's number of ranks in a trainer's process group: one, for any number of engines."""
    return {"world_size": 1}


@router.get("/server_info", responses=documented(InvalidRequest))
async def server_info(
    services: Here, request: Request, config_format: Literal["text", "json"] | None = None
) -> dict[str, object]:
    """Return vLLM's ``vllm_config`` and the state of the weight transfer with ``config_format=json``, which only vLLM's
    clients send. Return SGLang's arguments without it."""
    if config_format is None:
        return await sglang_server_info(services, request)
    if config_format == "text":
        raise InvalidRequest("GET /server_info: config_format=text is not implemented: ask for json")
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
        "lora_config": _lora_config(services.adapter_limits),
        # to a trainer the service is one server, whose replicas are not addressed separately
        "parallel_config": {"world_size": 1, "data_parallel_size": 1},
    }
    return {
        "vllm_config": vllm_config,
        "vllm_env": {},
        "system_env": {},
        "weight_transfer": transfer.model_dump(mode="json"),
    }


def _lora_config(limits: AdaptersConfig) -> dict[str, int] | None:
    if not limits.max_live:
        return None
    return {"max_lora_rank": limits.max_rank, "max_loras": limits.max_live, "max_cpu_loras": limits.max_live}


@router.get("/weight_info")
async def weight_info(services: Here) -> dict[str, str]:
    """Return the oldest version that a live replica serves."""
    fleet = await known_fleet(services)
    return {"weight_version": str(min(_served(fleet), default=fleet.latest_version))}


@router.post("/reset_prefix_cache", responses=documented(InvalidRequest, Overtaken))
async def reset_prefix_cache(
    services: Here,
    body: ResetPrefixCache | None = None,
    reset_running_requests: bool = False,
    reset_external: bool = False,
) -> dict[str, bool]:
    """Confirm that new requests read no prefix-cache entries of weights older than the newest version's.

    With ``weights.kv_cache_on_update: keep``, ``reset_running_requests`` drops the whole KV cache of every replica, and
    running requests recompute theirs. Otherwise each version has done that already.
    """
    if reset_external or (body is not None and body.reset_external):
        raise InvalidRequest("reset_external is not implemented: engines here have no external prefix cache")
    if services.keeps_kv_cache and (reset_running_requests or (body is not None and body.reset_running_requests)):
        await services.ingest.drop_kv_cache(_RESET_S)
    fleet = await known_fleet(services)
    return {"success": all(version == fleet.latest_version for version in _served(fleet))}


@router.post("/weight_checker", responses=documented(InvalidRequest, WeightTransferFailed))
async def weight_checker(body: CheckWeights, services: Here) -> dict[str, object]:
    """Return the xxh3-128 of each loaded tensor, or compare the digests with a ``baseline``.

    The digests are those in the version's manifest. Each replica checks loaded bytes against them.
    """
    if body.action == "reset":
        raise InvalidRequest("weight_checker: reset is not implemented: weights change by a new version alone")
    if body.action == "compare" and body.baseline is None:
        raise InvalidRequest("weight_checker: compare needs a baseline: the checksums of another request")
    found = await loaded_digests(services)
    if body.baseline is None or body.action == "checksum":
        return {"checksums": found.digests}
    mismatches = different(found.digests, body.baseline)
    return {"match": not mismatches, "mismatches": mismatches}


async def loaded_digests(services: Services) -> TensorDigests:
    """Return the digests of the newest version. Raises WeightTransferFailed unless all replicas serve it."""
    fleet = await known_fleet(services)
    found = await services.ingest.tensor_digests()
    if behind := sorted({*_served(fleet)} - {found.version}):
        raise WeightTransferFailed(
            f"replicas serve the versions {behind} beside {found.version}: ask again when all serve the newest",
            {"versions": behind, "latest_version": found.version},
        )
    return found


def different(digests: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the names of tensors that differ, or that one side does not have, sorted."""
    return sorted(name for name in digests.keys() | others.keys() if digests.get(name) != others.get(name))


def _served(fleet: Fleet) -> list[int]:
    return [replica.version for replica in fleet.unpinned if replica.version is not None]
