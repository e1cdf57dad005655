"""Rollouts without end, each of which must be answered once and hold nothing stale."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError
from rollout_service.protocol.rollout import Rollout
from tests.support.telltale import assert_pure

CONCURRENCY, EASED = 16, 4
PROMPT, MAX_TOKENS = [5, 6, 7, 8], 48


@dataclass
class Load:
    """What came of the rollouts."""

    rollouts: int = 0
    stale: list[str] = field(default_factory=list)
    """What was wrong with completions that hold a stale token."""
    lost: list[str] = field(default_factory=list)
    """Errors of requests that were not answered although the client asked again and again."""

    eased: bool = False
    """Whether only ``EASED`` are under way: enough to see who serves what while an engine starts on the same cores."""

    def ease(self) -> None:
        """From now on only ``EASED`` at a time."""
        self.eased = True

    async def once(self, client: RolloutClient) -> None:
        """One request."""
        try:
            rollout = await client.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        except (RolloutServiceError, httpx.TransportError) as error:
            self.lost.append(f"{type(error).__name__}: {error}")
            return
        except asyncio.CancelledError:
            self.lost.append("still unanswered when the load was given up")
            raise
        self.rollouts += 1
        self._look_for_stale_tokens(rollout)

    def _look_for_stale_tokens(self, rollout: Rollout) -> None:
        for completion in rollout.completions:
            if len(completion.token_ids) != MAX_TOKENS:
                self.lost.append(f"{len(completion.token_ids)} of {MAX_TOKENS} tokens, {completion.finish_reason}")
            try:
                assert_pure(completion)
            except AssertionError as error:
                self.stale.append(str(error))


@asynccontextmanager
async def load(url: str, concurrency: int) -> AsyncIterator[Load]:
    """``concurrency`` requests at any time until the block ends; those under way are waited for."""
    result, stop = Load(), asyncio.Event()

    async def work(client: RolloutClient, number: int) -> None:
        while not stop.is_set() and not (result.eased and number >= EASED):
            await result.once(client)

    async with RolloutClient(url, retries=12) as client, asyncio.TaskGroup() as group:
        for number in range(concurrency):
            group.create_task(work(client, number))
        try:
            yield result
        finally:
            stop.set()
