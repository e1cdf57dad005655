"""Rollouts without end, each of which must be answered once and hold nothing stale.

With a kept KV cache they are turns of sessions, which read keys and values of older versions, up to a bound.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError
from rollout_service.protocol.rollout import Completion, Rollout
from tests.support.telltale import CANDIDATES, assert_bounded, assert_pure

CONCURRENCY, EASED = 16, 4
PROMPT, MAX_TOKENS = [5, 6, 7, 8], 48
SESSION_PROMPT, TURNS = 10 * PROMPT, 6


@dataclass
class Load:
    """What came of the rollouts."""

    kv_max_age: int | None = None
    """The bound of kept keys and values; None: every version drops them."""
    rollouts: int = 0
    kept_tokens: int = 0
    """Tokens that read keys and values of older versions than their own."""
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
        """One request, or one session."""
        if self.kv_max_age is None:
            await self._ask(client, PROMPT)
            return
        session, prompt = uuid.uuid4().hex, SESSION_PROMPT
        for _ in range(TURNS):
            rollout = await self._ask(client, prompt, session_id=session, logprobs=CANDIDATES)
            if rollout is None:
                return
            prompt = [*prompt, *rollout.completions[0].token_ids]

    async def _ask(self, client: RolloutClient, prompt: list[int], **options: object) -> Rollout | None:
        options |= {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
        try:
            rollout = await client.generate(prompt, **options)  # type: ignore[arg-type]
        except (RolloutServiceError, httpx.TransportError) as error:
            self.lost.append(f"{type(error).__name__}: {error}")
            return None
        except asyncio.CancelledError:
            self.lost.append("still unanswered when the load was given up")
            raise
        self.rollouts += 1
        self._look_for_stale_tokens(rollout)
        return rollout

    def _look_for_stale_tokens(self, rollout: Rollout) -> None:
        for completion in rollout.completions:
            if len(completion.token_ids) != MAX_TOKENS:
                self.lost.append(f"{len(completion.token_ids)} of {MAX_TOKENS} tokens, {completion.finish_reason}")
            try:
                self._assert_fresh(completion)
            except AssertionError as error:
                self.stale.append(str(error))

    def _assert_fresh(self, completion: Completion) -> None:
        if self.kv_max_age is None:
            assert_pure(completion)
        else:
            self.kept_tokens += assert_bounded(completion, self.kv_max_age)


@asynccontextmanager
async def load(url: str, concurrency: int, kv_max_age: int | None = None) -> AsyncIterator[Load]:
    """``concurrency`` requests at any time until the block ends; those under way are waited for."""
    result, stop = Load(kv_max_age), asyncio.Event()

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
