"""The router with all SGLang routes."""

from fastapi import APIRouter

from rollout_service.gateway.sglang import control, generate, info, weights

router = APIRouter()
for _routes in (generate.router, info.open_router, info.router, control.router, weights.router):
    router.include_router(_routes)
