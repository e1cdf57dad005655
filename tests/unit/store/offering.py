"""An ingest as a node without its log meets it: it hands out files, and can be away."""

import asyncio

import ray

from rollout_service.errors import NotReady
from rollout_service.protocol.weight_log import LogFile, Newest
from rollout_service.store.node_cache import ChunkServer

CHUNK_BYTES = 64
"""Small, so that small files have several."""
LONG_S = 30.0


class OfferingIngest:
    """Real files through a real object store; only the way to the ingest is short."""

    def __init__(self, served: ChunkServer) -> None:
        self.served = served
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

    async def has_refused(self) -> None:
        """Return once somebody is told that it is away, from now on."""
        self.refused.clear()
        await asyncio.wait_for(self.refused.wait(), LONG_S)

    async def newest(self) -> Newest:
        if self.unreachable is not None:
            self.refused.set()
            raise self.unreachable
        return self.answers.pop(0) if self.answers else self.served.newest()

    async def files(self, version: int) -> tuple[LogFile, ...]:
        return self.served.files(version)

    async def chunk(self, version: int, file: str, index: int) -> list[ray.ObjectRef]:
        if self.fail_after is not None and len(self.chunks) >= self.fail_after:
            raise NotReady("the ingest died with this call")
        self.chunks.append((version, file, index))
        return await self.served.chunk(version, file, index)
