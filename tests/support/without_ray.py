"""The ingest behind the gateway's routes in one process, without Ray and without an engine."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from rollout_service.config import ServiceConfig, ShadowConfig
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.gateway.dependencies import Services
from rollout_service.ingest.ingest import Ingest
from rollout_service.monitor.feed import RolloutFeed
from rollout_service.monitor.monitor import Monitor
from rollout_service.shadow.feed import ShadowFeed
from rollout_service.web.auth import Authorizer


@dataclass
class RemoteMethod:
    """``method.remote(...)`` as on a Serve handle."""

    remote: Callable[..., Awaitable[Any]]


@dataclass
class LocalHandle:
    """A deployment in this process, behind the face of its handle."""

    deployment: object

    def __getattr__(self, method: str) -> RemoteMethod:
        return RemoteMethod(getattr(self.deployment, method))


def services_of(ingest: Ingest, config: ServiceConfig, authorizer: Authorizer, http: httpx.AsyncClient) -> Services:
    """What a gateway's routes stand on, with ``ingest`` in this process and nothing that generates."""
    monitor = LocalHandle(Monitor(config.monitor))
    return Services(
        name="model",
        vocab_size=128,
        max_model_len=64,
        tokenizer=None,
        dispatcher=Dispatcher(None, None, config.engine),
        ingest=LocalHandle(ingest),
        authorizer=authorizer,
        http=http,
        monitor=monitor,
        feed=RolloutFeed(monitor, 0),
        shadow=ShadowFeed(None, ShadowConfig()),
    )
