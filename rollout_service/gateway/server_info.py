"""``GET /server_info``, which clients of SGLang and of vLLM both call. Only vLLM's send ``config_format``."""

from typing import Literal

from fastapi import APIRouter

from rollout_service.errors import InvalidRequest
from rollout_service.gateway.dependencies import Here
from rollout_service.gateway.routes import GuardedRoute
from rollout_service.gateway.sglang.info import server_info as sglang_server_info
from rollout_service.gateway.vllm_weights import vllm_server_info
from rollout_service.web.errors import documented

router = APIRouter(tags=["trainers"], route_class=GuardedRoute)


@router.get("/server_info", responses=documented(InvalidRequest))
async def server_info(services: Here, config_format: Literal["text", "json"] | None = None) -> dict[str, object]:
    """Return vLLM's ``vllm_config`` with ``config_format=json``, and SGLang's arguments without it."""
    if config_format is None:
        return await sglang_server_info(services)
    if config_format == "text":
        raise InvalidRequest("GET /server_info: config_format=text is not implemented: ask for json")
    return await vllm_server_info(services)
