"""An engine, and what stands for the ingest where folders are told, in this process."""

from dataclasses import dataclass, field
from pathlib import Path

import httpx

from rollout_service.client import RolloutClient
from rollout_service.errors import NotFound, RolloutServiceError
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


def http_to(services: Services, host: str = "127.0.0.1") -> httpx.AsyncClient:
    """Return plain HTTP to a gateway, from a program on ``host``."""
    transport = httpx.ASGITransport(create_app(services), client=(host, 1))
    headers = {"Content-Type": "application/json"}  # of bodies that tests send as bytes
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)


def client_of(services: Services) -> RolloutClient:
    """Return a client of a gateway."""
    return RolloutClient("http://gateway", transport=httpx.ASGITransport(create_app(services), client=("127.0.0.1", 1)))
