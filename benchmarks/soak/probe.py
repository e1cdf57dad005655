"""Short rollouts all the time, to see when there is service."""

import asyncio

import httpx

from benchmarks.faults.load import PROMPT, Load
from benchmarks.soak.account import Timeline
from benchmarks.soak.diary import Diary
from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError
from tests.support.telltale import assert_pure

EVERY_S, TIMEOUT_S = 0.1, 2.0


class Probe:
    """Asks for one token every ``EVERY_S``, whether the probe before was answered or not."""

    def __init__(self, url: str, diary: Diary, load: Load) -> None:
        """``load``: where a stale token is noted."""
        self._url, self._diary, self._load = url, diary, load
        self.timeline = Timeline()
        self.newest_version = -1
        """Of all weights that made an answer."""

    async def run(self) -> None:
        """Until it is cancelled."""
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
