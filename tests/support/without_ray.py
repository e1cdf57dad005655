"""The ingest behind the gateway's routes in one process, without Ray and without an engine."""

from typing import cast

import httpx

from rollout_service.config import ServiceConfig
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.gateway.dependencies import Services
from rollout_service.ingest.ingest import Ingest
from rollout_service.monitor.monitor import Monitor
from rollout_service.runtime.rpc import EngineCalls, IngestCalls
from rollout_service.web.auth import Authorizer


def services_of(ingest: Ingest, config: ServiceConfig, authorizer: Authorizer, http: httpx.AsyncClient) -> Services:
    """What a gateway's routes stand on, with ``ingest`` in this process and nothing that generates."""
    monitor = Monitor(config.monitor)
    return Services(
        name="model",
        vocab_size=128,
        max_model_len=64,
        tokenizer=None,
        dispatcher=Dispatcher(cast(EngineCalls, None), cast(IngestCalls, None), config.engine),
        ingest=cast(IngestCalls, ingest),  # Serve makes its plain methods awaitable
        authorizer=authorizer,
        http=http,
        monitor=monitor,
    )
