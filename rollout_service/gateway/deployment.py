"""The gateway as a Serve deployment: the HTTP ingress of the application."""

import asyncio
import logging
from dataclasses import replace

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from rollout_service import __version__
from rollout_service.config import ServiceConfig
from rollout_service.fleet.serve_status import watch_controller
from rollout_service.gateway import (
    adapters,
    areal,
    completions,
    control,
    generate,
    metrics,
    mismatch,
    models,
    score,
    tinker,
    update_weights,
    vllm_weights,
    weights,
)
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.graceful_shutdown import OpenRequests, Removal
from rollout_service.gateway.openai import routes as openai
from rollout_service.gateway.openai import sessions
from rollout_service.gateway.openai.serving import LazyServing
from rollout_service.gateway.sglang import routers as sglang
from rollout_service.gateway.standby import Standby
from rollout_service.model.hub import with_model_here
from rollout_service.runtime.connections import SERVED_FILES, raise_open_files
from rollout_service.runtime.drain import Drain
from rollout_service.runtime.logs import log_with_serve
from rollout_service.runtime.tasks import start_watch
from rollout_service.web.errors import install_error_handlers

logger = logging.getLogger(__name__)
SURFACES = (
    *(generate, score, completions, openai, sessions, models),
    *(weights, adapters, update_weights, vllm_weights, mismatch, control, metrics),
    *(sglang, areal, tinker),
)
"""All route modules: data routes, routes that need authorization, metrics, and the APIs of other servers."""


def create_app(services: Services) -> FastAPI:
    """Return the FastAPI application with all routes."""
    # include_router would create each route again
    routes = [route for surface in SURFACES for route in surface.router.routes]
    app = FastAPI(title="rollout service", version=__version__, routes=routes)
    app.state.services = services
    install_error_handlers(app)
    return app


@serve.ingress()
class GatewayReplica:
    """The Serve replica of the gateway. It owns the deployment handles; the routes handle requests."""

    def __init__(
        self,
        config: ServiceConfig,
        engine: DeploymentHandle,
        ingest: DeploymentHandle,
        monitor: DeploymentHandle,
        sessions: DeploymentHandle | None,
        groups: dict[str, DeploymentHandle],
    ) -> None:
        log_with_serve()
        self._drain = Drain(config.scaling.drain_timeout_s)
        self._drain.begin_on_sigterm()
        raise_open_files(SERVED_FILES)  # it may stand in for Serve's proxy
        if config.auth.trusted_networks:
            logger.warning(
                "auth.trusted_networks: whoever can open a connection from %s needs no token, and can replace the "
                "model's weights, read their versions and pause the engines",
                ", ".join(map(str, config.auth.trusted_networks)),
            )
        config = with_model_here(config)
        chats = LazyServing(config)
        services = replace(Services.create(config, engine, ingest, monitor, sessions, groups), chats=chats)
        chats.make_if_configured(services)
        self._open = OpenRequests()
        self._removal = Removal(self._open, self._drain.work_s)
        self._app = create_app(services)
        self._app.add_middleware(self._open.middleware)
        self._standby = Standby(self._app)
        watches = (watch_controller, self._removal.watch, self._standby.watch, services.dispatcher.show_queue)
        self._watching = [start_watch(watch.__qualname__, watch()) for watch in watches]
        self._drain.serves(self._end)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def check_health(self) -> None:
        """Fail Serve's health check once this process is draining."""
        self._removal.note_health_check()
        self._drain.check_health()

    async def _end(self) -> None:
        self._standby.close()
        await asyncio.sleep(self._drain.left_s)
        self._open.refuse()
