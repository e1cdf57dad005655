"""Dependencies of the gateway's routes: properties of the served model, and clients of the other deployments."""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

import httpx
import ray
from fastapi import Depends, Header, Request
from ray import serve
from ray.serve.handle import DeploymentHandle
from transformers import PreTrainedTokenizerBase

from rollout_service.config import AdaptersConfig, ServiceConfig
from rollout_service.errors import NotReady
from rollout_service.fleet.detokenizer import decoder_of
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.fleet.serve_status import ServeMessages, not_running
from rollout_service.gateway.tinker_samples import Samples
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.adapters import WantedAdapter, read_adapter_name
from rollout_service.runtime.connections import ManyConnections
from rollout_service.runtime.placements import routed_fleet
from rollout_service.runtime.rpc import (
    EngineClient,
    IngestCalls,
    MonitorCalls,
    SessionCalls,
    ingest_client,
    monitor_client,
    session_client,
)
from rollout_service.runtime.tls import PinnedCertificates
from rollout_service.sessions.store import SessionStore
from rollout_service.web.auth import Authorizer

MAX_FORWARDED_PARTS = 64
"""Maximum number of concurrent part uploads to the ingest; more wait."""
INGEST_ANSWERS_S = 5.0
"""Timeout in seconds. An ingest that cannot start never answers, and the caller should learn the reason soon."""
_Answer = TypeVar("_Answer")


async def answer_of_ingest(answer: Awaitable[_Answer]) -> _Answer:
    """Return the answer of the ingest. Raises NotReady if it does not come soon."""
    try:
        async with asyncio.timeout(INGEST_ANSWERS_S):
            return await answer
    except TimeoutError as error:
        raise NotReady(f"the ingest has not answered for {INGEST_ANSWERS_S:g} s: send it again") from error


class KnownAdapters:
    """The committed adapters, as this gateway last read them."""

    MAX_AGE_S = 5.0
    """Time in seconds after which the ingest is asked again."""

    def __init__(self, ingest: IngestCalls) -> None:
        self._ingest, self._lock = ingest, asyncio.Lock()
        self._versions: dict[str, tuple[int, ...]] = {}
        self._read_at = -self.MAX_AGE_S
        self._failure: NotReady | None = None
        """The error of the last reading."""

    async def find(self, asked: str, min_version: int | None = None) -> WantedAdapter | None:
        """Return the adapter that ``run-a`` or ``run-a@3`` means. None: there is none.

        Raises NotReady if it is not known here, and the ingest does not answer.
        """
        if (parsed := read_adapter_name(asked)) is None:
            return None
        name, exact = parsed
        began = time.monotonic()
        if not self._has(name, exact) or began - self._read_at > self.MAX_AGE_S:
            await self._read_since(began)
        if not self._has(name, exact):
            if self._failure is not None:
                raise NotReady(f"adapter {asked!r} is not known here: {self._failure.message}") from self._failure
            return None
        return WantedAdapter(name=name, min_version=min_version, exact_version=exact)

    async def names(self) -> tuple[str, ...]:
        """Return the names of all adapters."""
        await self._read_since(time.monotonic())
        return tuple(self._versions)

    def _has(self, name: str, exact: int | None) -> bool:
        versions = self._versions.get(name, ())
        # a later version may be committed any moment, and the request waits for it
        return bool(versions) and (exact is None or exact in versions or exact > versions[-1])

    async def _read_since(self, began: float) -> None:
        """Read the adapters, unless another request has done so since ``began``."""
        async with self._lock:
            if self._read_at >= began:
                return
            try:
                found: dict[str, tuple[int, ...]] = {}
                for adapter in await answer_of_ingest(self._ingest.adapters()):
                    found[adapter.name] = (*found.get(adapter.name, ()), adapter.version)
                self._versions, self._failure = found, None
            except NotReady as error:  # the ingest is being replaced: what is known still holds
                self._failure = error
            self._read_at = time.monotonic()


class Chats(Protocol):
    """The interface of ``gateway/openai/serving.py``, which imports this file."""

    async def get(self, services: "Services") -> Any:
        """Return its ``Serving``."""


@dataclass(frozen=True)
class Services:
    """The dependencies of all routes, created once per gateway replica."""

    name: str
    """The model's name in requests."""
    vocab_size: int
    max_model_len: int
    tokenizer: PreTrainedTokenizerBase | None
    dispatcher: Dispatcher
    """Sends requests to the engines."""
    ingest: IngestCalls
    authorizer: Authorizer
    http: httpx.AsyncClient
    """HTTP client of the ingest's upload listener."""
    monitor: MonitorCalls
    pinned: PinnedCertificates = field(default_factory=PinnedCertificates)
    """The certificates that ``http`` trusts."""
    aliases: tuple[str, ...] = ()
    """Additional names of the model."""
    chats: "Chats | None" = None
    """Answers chat requests. None: chats are not available."""
    adapters: KnownAdapters | None = None
    """The committed adapters. None: no adapters are served."""
    adapter_limits: AdaptersConfig = field(default_factory=AdaptersConfig)
    """The settings ``engine.adapters``."""
    sessions: SessionCalls = field(default_factory=SessionStore)
    """The sessions of agents."""
    samples: Samples | None = field(default_factory=Samples)
    """The samples of Tinker's SDK. None: they are refused, because there are several gateways."""
    returns_masks: bool = False
    """The setting ``engine.return_sampling_mask``."""
    returns_experts: bool = False
    """The setting ``engine.return_routed_experts``."""
    max_logprobs: int = 20
    """Maximum number of top logprobs that a request may ask for: ``engine.max_logprobs``."""
    may_sleep: bool = False
    """The setting ``engine.enable_sleep_mode``."""
    keeps_kv_cache: bool = False
    """True if ``weights.kv_cache_on_update`` is ``keep``."""
    serve_messages: ServeMessages = field(default_factory=partial(ServeMessages, dict))
    """Serve's messages about deployments that are not running."""
    tensor_parallel_size: int = 1
    """Number of GPUs per engine."""
    node_id: str | None = None
    """Ray node of this process. None: the process is not in a Ray cluster."""

    @classmethod
    def create(
        cls,
        config: ServiceConfig,
        engine: DeploymentHandle,
        ingest: DeploymentHandle,
        monitor: DeploymentHandle,
        sessions: DeploymentHandle | None,
        groups: Mapping[str, DeploymentHandle],
    ) -> "Services":
        """Read the model's properties and the token. Without ``sessions``, sessions are kept in this process.

        ``groups``: the pinned engines' deployments, by the names in ``scaling.groups``.
        """
        model = ServedModel.of(config.model)
        calls_ingest, calls_monitor = ingest_client(ingest), monitor_client(monitor)
        pinned = PinnedCertificates()
        tokenizer = model.tokenizer
        decode = None if tokenizer is None else decoder_of(tokenizer)

        def dispatcher(handle: DeploymentHandle, group: str | None, groups: Sequence[Dispatcher] = ()) -> Dispatcher:
            engines, fleet = EngineClient(handle), routed_fleet(group)
            return Dispatcher(engines, calls_ingest, config.engine, decode, fleet, config.sequences_per_gateway, groups)

        return cls(
            name=config.model.name,
            vocab_size=model.vocab_size,
            max_model_len=config.engine.max_model_len,
            tokenizer=tokenizer,
            # options() makes Serve start the router, which a call for a group's version needs to find the group
            dispatcher=dispatcher(
                engine, None, [dispatcher(handle.options(), name) for name, handle in groups.items()]
            ),
            ingest=calls_ingest,
            authorizer=Authorizer(config.auth.secret(), config.auth.trusted_networks),
            http=httpx.AsyncClient(  # a client that disconnects during an upload must not break a shared connection
                timeout=httpx.Timeout(300.0, connect=10.0),
                transport=ManyConnections(MAX_FORWARDED_PARTS, pinned.context),
            ),
            pinned=pinned,
            monitor=calls_monitor,
            aliases=config.model.aliases,
            adapters=KnownAdapters(calls_ingest) if config.engine.adapters.max_live else None,
            sessions=SessionStore() if sessions is None else session_client(sessions),
            samples=Samples() if config.scaling.gateways == 1 else None,
            returns_masks=config.engine.return_sampling_mask,
            returns_experts=config.engine.return_routed_experts,
            max_logprobs=model.vocab_size if config.engine.max_logprobs == -1 else config.engine.max_logprobs,
            may_sleep=config.engine.enable_sleep_mode,
            keeps_kv_cache=config.weights.kv_cache_on_update == "keep",
            serve_messages=ServeMessages(partial(not_running, serve.get_replica_context().app_name)),
            tensor_parallel_size=config.engine.tensor_parallel_size,
            adapter_limits=config.engine.adapters,
            node_id=ray.get_runtime_context().get_node_id(),
        )


# async, because FastAPI runs a plain function in a thread at every request
async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Here = Annotated[Services, Depends(_services)]
"""Parameter of every route. The router's ``route_class`` handles authorization, see ``gateway/routes.py``."""

SessionHeader = Annotated[str | None, Header(alias="X-Session-Id", max_length=256)]
"""Parameter of a data route: the session id, for clients that send it as a header."""
