"""A trainer that pushes without end, and holds what it was told against the log."""

import asyncio
import random
from typing import Any

import httpx

from benchmarks.faults.ground import Ground
from benchmarks.faults.kills import newest
from benchmarks.soak.account import Versions
from benchmarks.soak.diary import Diary
from rollout_service.errors import RolloutServiceError
from rollout_service.protocol.fleet import PauseMode

PAUSE_S = 0.5
MODES: tuple[PauseMode, ...] = ("keep", "abort", "wait")


class Pusher:
    """Pushes one version after the other, each again until the service says that it is committed."""

    def __init__(self, place: Ground, diary: Diary, seed: int) -> None:
        self._place, self._diary, self._draw = place, diary, random.Random(seed)
        self.versions = Versions()
        self.version = 1
        """The one that is being pushed."""
        self.failed = 0
        """Pushes that failed although the client had tried again and again, and were repeated."""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.once()
            await asyncio.sleep(PAUSE_S)
            self.version += 1

    async def first(self) -> None:
        """The first version, until every replica serves it."""
        await self.once()
        await self._place.client.wait_live(self.version)
        self.version += 1

    async def once(self) -> None:
        """One version, until it is committed."""
        weights, mode = await asyncio.to_thread(self._place.weights, self.version), self._draw.choice(MODES)
        while not await self._accepted(weights, mode):
            await asyncio.sleep(PAUSE_S)
        self.versions.said(self.version)
        self.look()

    async def _accepted(self, weights: dict[str, Any], mode: PauseMode) -> bool:
        try:
            await self._place.client.push_weights(self.version, weights, mode=mode, wait="none")
        except (RolloutServiceError, httpx.TransportError) as error:
            self.failed += 1
            self._diary.note("push failed", version=self.version, error=f"{type(error).__name__}: {error}"[:500])
            return False
        return True

    def look(self) -> None:
        """Hold what was said to be committed against the log."""
        latest = newest(self._place)
        if lost := self.versions.found(latest):
            self._diary.note("versions lost", versions=sorted(lost), latest=latest)
