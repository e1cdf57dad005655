"""An engine, and what stands for the ingest where folders are told, in this process."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from rollout_service.client import RolloutClient
from rollout_service.config.engine import EngineConfig
from rollout_service.errors import NotFound, RolloutServiceError
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.rollout import Candidate, Completion, Rollout, Span
from rollout_service.protocol.sampling import GenerateCall
from rollout_service.protocol.upload import CommitUpload, PullWeights
from rollout_service.protocol.weights import WeightStatus


@dataclass
class EchoEngine:
    """Completes a prompt with its own reverse, ``n`` times."""

    calls: list[GenerateCall] = field(default_factory=list)
    top_logprobs: tuple[tuple[Candidate, ...], ...] | None = None
    prompt_logprobs: tuple[tuple[Candidate, ...] | None, ...] | None = None
    scores: CompactLogprobs | None = None
    cached_tokens: int = 0

    async def generate(self, call: GenerateCall) -> Rollout:
        self.calls.append(call)
        tokens = call.prompt_token_ids[::-1]
        completions = tuple(
            Completion(
                index=index,
                token_ids=tokens,
                logprobs=tuple(-0.5 * (i + 1) for i in range(len(tokens))),
                finish_reason="length",
                spans=(Span(version=7, start=0, end=len(tokens)),),
                top_logprobs=self.top_logprobs,
                prompt_logprobs=self.prompt_logprobs,
                scores=self.scores,
            )
            for index in range(call.sampling.n)
        )
        return Rollout(
            request_id=call.request_id,
            prompt_token_ids=call.prompt_token_ids,
            completions=completions,
            replica_id="r1",
            cached_tokens=self.cached_tokens,
        )


@dataclass
class LabelIngest:
    """Knows which version each label means."""

    versions: dict[str, int]

    async def version_of(self, label: str) -> int:
        if label not in self.versions:
            raise NotFound(f"no version has the label {label!r}")
        return self.versions[label]


@dataclass
class FolderIngest:
    """Makes a version of every folder, or raises."""

    error: RolloutServiceError | None = None
    told: list[tuple[Path, CommitUpload, int | None]] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    pulled: list[PullWeights] = field(default_factory=list)

    async def pull_weights(self, request: PullWeights) -> WeightStatus:
        self.pulled.append(request)
        if self.error is not None:
            raise self.error
        return WeightStatus(version=request.target_version, state="staged")

    async def push_folder(
        self, path: Path, request: CommitUpload, number: int | None = None, label: str | None = None
    ) -> WeightStatus:
        self.told.append((path, request, number))
        self.labels.append(label)
        if self.error is not None:
            raise self.error
        return WeightStatus(version=number or 1, state="live")


class Silent:
    """A deployment that answers no call."""

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def wait(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        return wait


def with_engine(services: Services, engine: Any) -> Services:
    """Return the dependencies of a gateway whose only replica is ``engine``."""
    return replace(services, dispatcher=Dispatcher(engine, ingest=None, limits=EngineConfig()))


def http_to(services: Services, host: str = "127.0.0.1") -> httpx.AsyncClient:
    """Return plain HTTP to a gateway, from a program on ``host``."""
    transport = httpx.ASGITransport(create_app(services), client=(host, 1))
    headers = {"Content-Type": "application/json"}  # of bodies that tests send as bytes
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)


async def call_and_leave(services: Services, method: str, path: str, body: bytes, at: str | None) -> list[Any]:
    """Send a request, and disconnect when a message of the type ``at`` is sent; None: before the body has ended.

    Returns the messages of the reply. A client that leaves at the start never takes it.
    """
    sent, has_left = list[Any](), asyncio.Event()
    requests = iter([{"type": "http.request", "body": body, "more_body": at is None}])

    async def receive() -> Any:
        if (message := next(requests, None)) is not None:
            return message
        if at is not None:
            await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == at:
            has_left.set()
            if at == "http.response.start":
                await asyncio.Event().wait()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(), "query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")], "scheme": "http", "root_path": "",
    }  # fmt: skip
    await create_app(services)(scope, receive, send)
    return sent


def client_of(services: Services) -> RolloutClient:
    """Return a client of a gateway."""
    return RolloutClient("http://gateway", transport=httpx.ASGITransport(create_app(services), client=("127.0.0.1", 1)))
