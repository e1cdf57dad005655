"""A running service whose weights tell their version, and the ways to reach its processes and its files."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from rollout_service.client import RolloutClient
from rollout_service.client._retry import error_of
from rollout_service.errors import RolloutServiceError
from rollout_service.local import LocalService, running_service
from rollout_service.types import Fleet
from rollout_service.weights.upload import PART_DIGEST_HEADER
from tests.support.processes import descendants
from tests.support.telltale import telltale_weights

DEPLOYMENT = Path(__file__).parents[2] / "deployments/cpu_rollout.yaml"
REPLICAS = 2
PROCESSES = {
    "vllm worker": "VLLM::Worker",
    "engine core": "VLLM::EngineCore",
    "replica": "ray::ServeReplica:rollout:engine",
    "gateway": "ray::ServeReplica:rollout:gateway",
    "ingest": "ray::ServeReplica:rollout:ingest",
}
"""What can be killed → how its process is called."""


@dataclass
class Ground:
    """The service, a client that pushes, and the newest version that was said to be committed."""

    service: LocalService
    client: RolloutClient
    committed: int

    @property
    def log(self) -> Path:
        """The folder of the weight log."""
        return self.service.config.weights.root

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Weights that tell ``version``."""
        return telltale_weights(self.service.config.model.path, version)

    async def push(self, version: int, **options: object) -> None:
        """Push ``version``; it counts as committed once the service says so."""
        await self.client.push_weights(version, self.weights(version), **options)  # type: ignore[call-overload]
        self.committed = max(self.committed, version)

    async def send(self, method: str, route: str, **request: Any) -> None:
        """A single plain request, never repeated. Raises what the service answered, if it is an error."""
        async with httpx.AsyncClient(base_url=self.service.url, timeout=60) as http:
            response = await http.request(method, route, **request)
        if not response.is_success:
            raise error_of(response)

    async def put_part(self, version: int, part: int, data: bytes, digest: str) -> None:
        """One part of an upload."""
        await self.send(
            "PUT", f"/v1/weights/{version}/parts/{part}", content=data, headers={PART_DIGEST_HEADER: digest}
        )

    async def fleet(self) -> Fleet | None:
        """The fleet, or None while nobody answers."""
        with contextlib.suppress(RolloutServiceError):
            return await self.client.fleet()
        return None

    async def recovered(self, started: float, timeout_s: float) -> float | None:
        """Seconds from ``started`` until every replica is sound at the newest version and makes rollouts of it.

        Sound means for longer than a dead replica may still stand in the fleet's table. None if that is never.
        """
        since: float | None = None
        deadline = time.perf_counter() + timeout_s
        while since is None or time.perf_counter() - since < self.service.config.weights.dead_after_s + 2:
            if time.perf_counter() > deadline:
                return None
            if not await self._sound():
                since = None
            elif since is None:
                since = time.perf_counter()
            await asyncio.sleep(0.2)
        return since - started

    async def _sound(self) -> bool:
        fleet = await self.fleet()
        if fleet is None or fleet.latest_version < self.committed or len(fleet.replicas) != REPLICAS:
            return False
        if any(r.state != "ready" or r.version != fleet.latest_version for r in fleet.replicas):
            return False
        try:
            await self.client.generate([5, 6], max_tokens=2, min_weight_version=self.committed)
        except RolloutServiceError:
            return False
        return True


@contextmanager
def _service(folder: Path) -> Iterator[LocalService]:
    overrides = {
        "model": {"path": folder / "tiny-qwen3"},
        "engine": {"admission_limit": 256},
        "scaling": {"min_replicas": REPLICAS, "max_replicas": REPLICAS},
        "weights": {"root": folder / "log", "part_bytes": 256 << 10, "poll_s": 1.0, "dead_after_s": 5.0},
    }
    with running_service(DEPLOYMENT, overrides) as running:
        yield running


@asynccontextmanager
async def ground(folder: Path) -> AsyncIterator[Ground]:
    """The shipped CPU deployment with two replicas at a version that tells itself."""
    with _service(folder) as service:
        async with RolloutClient(service.url, retries=12) as client:
            place = Ground(service, client, committed=0)
            await place.push(1)
            yield place


def processes(name: str) -> list[psutil.Process]:
    """Processes of one kind of ``PROCESSES``. Raises LookupError if there is none."""
    found = descendants(PROCESSES[name])
    if not found:
        raise LookupError(f"no process is called {PROCESSES[name]}…")
    return found
