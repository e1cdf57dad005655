"""Sessions whose keys and values exceed a real engine's KV cache: which of them does the engine compute again?"""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollout_service.config.engine import EngineConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.admission import SessionAdmission, SessionTurn
from rollout_service.errors import KVCacheFull
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.protocol.fleet import Fleet
from rollout_service.protocol.progress import ProgressAsk, ProgressReply
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.sampling import GenerateCall, Sampling
from tests.engine.test_engine import committed, running_engine

# two minutes; tests/unit/engine/test_session_simulation.py simulates the engine
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BLOCK, BLOCKS = 32, 48
CAPACITY = BLOCK * BLOCKS
TURNS, TURN_TOKENS, TOOL_TOKENS = 6, 24, 40
SESSIONS = 4 * CAPACITY // (TURNS * (TURN_TOKENS + TOOL_TOKENS))


class Replica:
    """An engine behind a dispatcher; admits turns of sessions as replicas do."""

    def __init__(self, engine: EngineAdapter) -> None:
        self._engine, self._sessions = engine, SessionAdmission(engine.kv_cache_tokens, engine.scheduler)
        self.cached = self.prompts = self.refusals = 0

    async def generate(self, call: GenerateCall) -> Rollout:
        prompt = call.prompt_token_ids
        try:
            with self._sessions.admit(call) as turn:
                made = await self._engine.generate(call.request_id, prompt, call.sampling, note_cached=turn.note_cached)
                turn.end(made)
                self._count(call, turn)
        except KVCacheFull as full:
            self.refusals += 1
            raise KVCacheFull(full.message, {"replica_id": "r"}) from full
        return Rollout(request_id=call.request_id, prompt_token_ids=prompt, completions=made, replica_id="r")

    def _count(self, call: GenerateCall, turn: SessionTurn) -> None:
        self.cached += turn.cached_tokens
        self.prompts += len(call.prompt_token_ids)

    async def progress(self, ask: ProgressAsk) -> ProgressReply:
        raise NotImplementedError


class Ingest:
    async def fleet(self) -> Fleet:
        raise NotImplementedError


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineAdapter]:
    settings = {"block_size": BLOCK, "extra": {"num_gpu_blocks_override": BLOCKS}}
    config = await committed(tmp_path_factory.mktemp("memory"), "none", "bfloat16", **settings)
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with running_engine(config, monkeypatch) as engine:
            yield engine


async def run_session(dispatcher: Dispatcher, name: str, is_named: bool) -> int:
    """Run a session whose tool answers at once. Returns the number of its tokens."""
    tokens = random.Random(name)
    prompt = tuple(tokens.randrange(5, 100) for _ in range(TOOL_TOKENS))
    for turn in range(TURNS):
        call = GenerateCall(
            request_id=f"{name}-{turn}",
            prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=TURN_TOKENS, ignore_eos=True),
            session_id=name if is_named else None,
        )
        [completion] = (await dispatcher.complete(call)).completions
        await asyncio.sleep(0.01)
        prompt = (*prompt, *completion.token_ids, *range(5, 5 + TOOL_TOKENS))
    return len(prompt)


async def run_sessions(engine: EngineAdapter, mark: str, is_named: bool) -> Replica:
    replica = Replica(engine)
    dispatcher = Dispatcher(replica, Ingest(), EngineConfig())
    lengths = await asyncio.gather(
        *(run_session(dispatcher, f"{mark}{number}", is_named) for number in range(SESSIONS))
    )
    assert set(lengths) == {TOOL_TOKENS + TURNS * (TURN_TOKENS + TOOL_TOKENS)}
    return replica


async def test_sessions_find_their_cache_although_not_all_fit(engine):
    assert engine.kv_cache_tokens == CAPACITY
    without = await run_sessions(engine, "call", is_named=False)
    sessions = await run_sessions(engine, "session", is_named=True)
    assert sessions.refusals and not without.refusals
    assert sessions.cached > sessions.prompts / 4
    assert sessions.cached > 4 * without.cached


async def test_preemptions_for_want_of_memory_are_counted(engine):
    before = engine.scheduler.preemptions
    long = Sampling(max_tokens=CAPACITY // 4, ignore_eos=True)
    await asyncio.gather(*(engine.generate(f"long{i}", (5 + i,) * BLOCK, long) for i in range(8)))
    assert engine.scheduler.preemptions > before


async def test_update_counts_as_no_preemption(engine):
    before = engine.scheduler.preemptions
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    running = [asyncio.create_task(engine.generate(f"kept{i}", (5 + i,), sampling)) for i in range(4)]
    while not all(engine.tokens_since(f"kept{i}", [0]) for i in range(4)):
        await asyncio.sleep(0.01)
    await engine.pause("keep")
    await engine.resume()
    made = await asyncio.gather(*running)
    assert all(len(completion.token_ids) == 200 for [completion] in made)
    assert engine.scheduler.preemptions == before
