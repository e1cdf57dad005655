"""An ingest as a node without its log meets it: it hands out files, and can be away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayTaskError

from rollout_service.errors import RolloutServiceError
from rollout_service.store.chunk_server import ChunkServer, LogFile, Newest

CHUNK_BYTES = 64
"""Small, so that small files have several."""
LONG_S = 30.0


class _Method:
    """``method.remote(...)`` as on a Serve handle: errors come as Ray's."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self._method = method

    async def remote(self, *args: object) -> Any:
        try:
            return await self._method(*args)
        except RolloutServiceError as error:
            raise RayTaskError("ingest", "traceback", error).as_instanceof_cause() from error


class OfferingIngest:
    """Real files through a real object store; only the way to the ingest is short."""

    def __init__(self, offers: ChunkServer) -> None:
        self.offers = offers
        self.unreachable: Exception | None = None
        """Raised by every question for what is newest while it is set."""
        self.refused = asyncio.Event()
        """Somebody was told that it is away."""
        self.fail_after: int | None = None
        """Chunks until it dies."""
        self.answers: list[Newest] = []
        """To be given first."""
        self.chunks: list[tuple[int, str, int]] = []
        """Handed out."""
        self.newest, self.files, self.chunk = _Method(self._newest), _Method(self._files), _Method(self._chunk)

    async def has_refused(self) -> None:
        """Return once somebody is told that it is away, from now on."""
        self.refused.clear()
        await asyncio.wait_for(self.refused.wait(), LONG_S)

    async def _newest(self) -> Newest:
        if self.unreachable is not None:
            self.refused.set()
            raise self.unreachable
        return self.answers.pop(0) if self.answers else self.offers.newest()

    async def _files(self, version: int) -> tuple[LogFile, ...]:
        return self.offers.files(version)

    async def _chunk(self, version: int, file: str, index: int) -> list[ray.ObjectRef]:
        if self.fail_after is not None and len(self.chunks) >= self.fail_after:
            raise ActorDiedError()
        self.chunks.append((version, file, index))
        return await self.offers.chunk(version, file, index)
