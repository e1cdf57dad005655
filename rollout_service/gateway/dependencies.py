"""What the gateway's routes stand on: the served model's facts and the clients of the other deployments."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Protocol

import httpx
import ray
from fastapi import Depends, Header, Request
from ray import serve
from ray.serve.handle import DeploymentHandle
from transformers import PreTrainedTokenizerBase

from rollout_service.config import ServiceConfig
from rollout_service.connections import ManyConnections
from rollout_service.fleet.detokenizer import decoder_of
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.fleet.placements import ROUTED_FLEET
from rollout_service.fleet.serve_status import not_running
from rollout_service.gateway.detached import DetachedRollouts
from rollout_service.model.served_model import ServedModel
from rollout_service.monitor.feed import RolloutFeed
from rollout_service.rpc import (
    EngineClient,
    IngestCalls,
    MonitorCalls,
    SessionCalls,
    ingest_client,
    monitor_client,
    session_client,
    shadow_client,
)
from rollout_service.sessions.store import Sessions
from rollout_service.shadow.feed import ShadowFeed
from rollout_service.tls import PinnedCertificates
from rollout_service.web.auth import Authorizer

MAX_FORWARDED_PARTS = 64
"""At once, to the ingest; more wait."""


class Chats(Protocol):
    """What answers chats: ``gateway/openai/serving.py``, which imports this file."""

    async def get(self, services: "Services") -> Any:
        """Its ``Serving``."""


@dataclass(frozen=True)
class Services:
    """Made once per gateway replica."""

    name: str
    """The model's name in requests."""
    vocab_size: int
    max_model_len: int
    tokenizer: PreTrainedTokenizerBase | None
    dispatcher: Dispatcher
    """To the engines."""
    ingest: IngestCalls
    authorizer: Authorizer
    http: httpx.AsyncClient
    """To the ingest's upload listener."""
    monitor: MonitorCalls
    feed: RolloutFeed
    """Tells the monitor of rollouts."""
    shadow: ShadowFeed
    """Has some of them scored."""
    pinned: PinnedCertificates = field(default_factory=PinnedCertificates)
    """Whom ``http`` trusts."""
    aliases: tuple[str, ...] = ()
    """More names for it."""
    chats: "Chats | None" = None
    """Answers them. None: there are none."""
    sessions: SessionCalls = field(default_factory=Sessions)
    """What agents said."""
    detached: DetachedRollouts = field(default_factory=DetachedRollouts)
    """Rollouts that nobody waits for."""
    num_gateways: int = 1
    """``scaling.gateways``."""
    returns_masks: bool = False
    """``engine.return_sampling_mask``."""
    returns_experts: bool = False
    """``engine.return_routed_experts``."""
    max_logprobs: int = 20
    """Maximum number of top logprobs that a request may ask for: ``engine.extra.max_logprobs``."""
    may_sleep: bool = False
    """``engine.enable_sleep_mode``."""
    not_running: Callable[[], dict[str, str]] = dict
    """What Serve says of deployments that do not run; see ``fleet/serve_status.py``."""
    tensor_parallel_size: int = 1
    """GPUs of an engine."""
    node_id: str | None = None
    """Of this process in the Ray cluster; None: it is in none."""

    @classmethod
    def create(
        cls,
        config: ServiceConfig,
        engine: DeploymentHandle,
        ingest: DeploymentHandle,
        monitor: DeploymentHandle,
        shadow: DeploymentHandle | None,
        sessions: DeploymentHandle | None,
    ) -> "Services":
        """Read the model's facts and the token.

        Args:
            shadow: None if there is none.
            sessions: None if this process is to keep them.
        """
        model = ServedModel.of(config.model)
        calls_ingest, calls_monitor = ingest_client(ingest), monitor_client(monitor)
        pinned = PinnedCertificates()
        tokenizer = model.tokenizer
        return cls(
            name=config.model.name,
            vocab_size=model.vocab_size,
            max_model_len=config.engine.max_model_len,
            tokenizer=tokenizer,
            dispatcher=Dispatcher(
                EngineClient(engine),
                calls_ingest,
                config.engine,
                None if tokenizer is None else decoder_of(tokenizer),
                ROUTED_FLEET,
                config.sequences_per_gateway,
            ),
            ingest=calls_ingest,
            authorizer=Authorizer(config.auth.secret(), config.auth.trusted_networks),
            http=httpx.AsyncClient(  # callers go away in the middle of a part, and none may take a connection along
                timeout=httpx.Timeout(300.0, connect=10.0),
                transport=ManyConnections(MAX_FORWARDED_PARTS, pinned.context),
            ),
            pinned=pinned,
            monitor=calls_monitor,
            feed=RolloutFeed(calls_monitor, config.monitor.remember_tokens, config.scaling.gateways),
            shadow=ShadowFeed(None if shadow is None else shadow_client(shadow), config.shadow),
            aliases=config.model.aliases,
            sessions=Sessions() if sessions is None else session_client(sessions),
            num_gateways=config.scaling.gateways,
            returns_masks=config.engine.return_sampling_mask,
            returns_experts=config.engine.return_routed_experts,
            max_logprobs=model.vocab_size if config.engine.max_logprobs == -1 else config.engine.max_logprobs,
            may_sleep=config.engine.enable_sleep_mode,
            not_running=partial(not_running, serve.get_replica_context().app_name),
            tensor_parallel_size=config.engine.tensor_parallel_size,
            node_id=ray.get_runtime_context().get_node_id(),
        )


async def _services(request: Request) -> Services:  # or FastAPI asks a thread for it, at every request
    services: Services = request.app.state.services
    return services


Here = Annotated[Services, Depends(_services)]
"""Parameter of every route. Who may call it is a matter of the router's ``route_class``: ``gateway/routes.py``."""

SessionHeader = Annotated[str | None, Header(alias="X-Session-Id", max_length=256)]
"""Parameter of a data route: the session, for clients that name it in a header."""
