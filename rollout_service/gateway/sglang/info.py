"""SGLang's routes about the server: configuration, model, load and health."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rollout_service import __version__
from rollout_service.errors import NotReady
from rollout_service.gateway.control import failed_starts, known_fleet
from rollout_service.gateway.dependencies import Here, Services
from rollout_service.gateway.sglang.replies import ControlRoute, DataRoute
from rollout_service.protocol.fleet import Fleet, ReplicaStatus

router = APIRouter(tags=["sglang"], route_class=ControlRoute)
open_router = APIRouter(tags=["sglang"], route_class=DataRoute)
_ONE_SERVER = {
    "nnodes": 1,
    "node_rank": 0,
    "base_gpu_id": 0,
    "gpu_id_step": 1,
    "pp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
}
"""SGLang's defaults, for any number of replicas. miles 31f1ca9 ends at its start if one of them, the host or the port
is not its own (``sglang_utils/sglang_engine.py``)."""
LoadSections = Annotated[str, Query(pattern="^(core|disagg|queues)(,(core|disagg|queues))*$")]


@router.get("/get_server_info")
async def server_info(services: Here, request: Request) -> dict[str, object]:
    """Return the service as one SGLang server: the arguments that apply here, and the load of each engine.

    The newer route ``GET /server_info`` is in ``gateway/vllm_weights.py``.
    """
    fleet = await known_fleet(services)
    return {
        **_model(services, fleet),
        **_ONE_SERVER,
        "host": request.url.hostname,
        "port": request.url.port or 80,
        "tp_size": services.tensor_parallel_size,
        "context_length": services.max_model_len,
        "disaggregation_mode": "null",
        "enable_memory_saver": False,
        "enable_return_routed_experts": services.returns_experts,
        "internal_states": [_load(rank, replica) for rank, replica in enumerate(_serving_replicas(fleet))],
        "version": __version__,
    }


@router.get("/model_info")
@router.get("/get_model_info")
@router.get("/get_weight_version")
async def model_info(services: Here) -> dict[str, object]:
    """Return the served model and the newest weight version."""
    return _model(services, await known_fleet(services))


@router.get("/v1/loads")
async def loads(services: Here, include: LoadSections = "core") -> dict[str, object]:
    """Return the load of each engine as last reported, at least every ``weights.poll_s`` seconds.

    ``include``: sections, separated by commas. ``disagg`` and ``queues`` add nothing: ``core`` counts every request.
    """
    ranks = [_load(rank, replica) for rank, replica in enumerate(_serving_replicas(await known_fleet(services)))]
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": __version__,
        "dp_rank_count": len(ranks),
        "loads": ranks,
        "aggregate": {
            f"total_{name}_reqs": sum(rank[f"num_{name}_reqs"] for rank in ranks) for name in ("running", "waiting")
        }
        | {"total_reqs": sum(rank["num_total_reqs"] for rank in ranks)},
    }


@open_router.get("/health_generate", response_class=Response)
async def health_generate(services: Here) -> Response:
    """Answer 200 if a replica is ready, else 503, both empty. Each replica checks its own engine."""
    try:
        await failed_starts(services)
    except NotReady as error:
        return Response(status_code=error.http_status)
    return Response()


def _model(services: Services, fleet: Fleet) -> dict[str, object]:
    return {
        "model_path": services.name,
        "served_model_name": services.name,
        "tokenizer_path": services.name,
        "is_generation": True,
        "weight_version": str(fleet.latest_version),
    }


def _serving_replicas(fleet: Fleet) -> list[ReplicaStatus]:
    return sorted((r for r in fleet.unpinned if r.version is not None), key=lambda r: r.replica_id)


def _load(rank: int, replica: ReplicaStatus) -> dict[str, float]:
    """Return the load of a replica in sequences. An admitted sequence without an answer is either running or
    waiting."""
    load = replica.load
    running = 0 if load is None else min(load.running, replica.running)
    told: dict[str, float] = {
        "dp_rank": rank,
        "num_running_reqs": running,
        "num_waiting_reqs": replica.running - running,
        "num_total_reqs": replica.running,
        "num_reqs": replica.running,
    }
    if load is not None:
        told |= {"max_total_num_tokens": load.kv_cache_tokens, "token_usage": load.kv_cache_usage}
    return told
