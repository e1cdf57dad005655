"""A probe that shows when there is service, and a trainer that pushes without end."""

import asyncio
import random
from typing import Any

import httpx

from benchmarks.faults.ground import PROMPT, Ground, Load
from benchmarks.faults.kills import newest
from benchmarks.soak.account import Diary, Timeline, Versions
from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError
from rollout_service.protocol.fleet import PauseMode
from tests.support.telltale import assert_pure

EVERY_S, TIMEOUT_S = 0.1, 2.0
PAUSE_S = 0.5
MODES: tuple[PauseMode, ...] = ("keep", "abort", "wait")


class Probe:
    """Asks for one token every ``EVERY_S``, whether the probe before was answered or not."""

    def __init__(self, url: str, diary: Diary, load: Load) -> None:
        """``load``: where a stale token is noted."""
        self._url, self._diary, self._load = url, diary, load
        self.timeline = Timeline()
        self.newest_version = -1
        """Of all weights that made an answer."""

    async def run(self) -> None:
        async with RolloutClient(self._url, retries=0) as client, asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._once(client))
                await asyncio.sleep(EVERY_S)

    async def _once(self, client: RolloutClient) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                rollout = await client.generate(PROMPT, max_tokens=1, temperature=0.0, ignore_eos=True)
        except (RolloutServiceError, httpx.TransportError, TimeoutError):
            return
        self.timeline.answered(self._diary.now())
        (completion,) = rollout.completions
        self.newest_version = max(self.newest_version, *completion.versions)
        try:
            assert_pure(completion)
        except AssertionError as error:
            self._load.stale.append(str(error))


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
        while True:
            await self.once()
            await asyncio.sleep(PAUSE_S)
            self.version += 1

    async def first(self) -> None:
        await self.once()
        await self._place.client.wait_live(self.version)
        self.version += 1

    async def once(self) -> None:
        """Push one version, until it is committed."""
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
