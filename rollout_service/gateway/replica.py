"""The gateway as a Serve deployment: the application's HTTP ingress."""

from typing import Any

from fastapi import FastAPI
from ray import serve

from rollout_service import __version__
from rollout_service.config import ServiceConfig
from rollout_service.gateway import completions, control, generate, metrics, mismatch, models, weights
from rollout_service.gateway.services import Services
from rollout_service.logs import log_with_serve
from rollout_service.web.errors import install_error_handlers


def create_app(services: Services) -> FastAPI:
    """All routes."""
    app = FastAPI(title="rollout service", version=__version__)
    app.state.services = services
    install_error_handlers(app)
    for surface in (generate, completions, models, weights, mismatch, control, metrics):
        app.include_router(surface.router)
    return app


@serve.ingress()
class GatewayReplica:
    """Holds the handles; the routes do the rest."""

    def __init__(self, config: ServiceConfig, engine: Any, ingest: Any, monitor: Any, shadow: Any) -> None:
        log_with_serve()
        self._services = Services.create(config, engine, ingest, monitor, shadow)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._services)
