"""Sessions of agents through gateways' real dispatchers and a replica's real admission, in virtual time.

The replica's engine is a model of one: a cache whose idle entries leave by last use, prefill one after the other, and
decode steps of one duration.
"""

import asyncio
import random
from collections import Counter, OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest

from rollout_service.config.engine import EngineConfig
from rollout_service.engine.admission import SessionAdmission, SessionTurn
from rollout_service.errors import KVCacheFull
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.protocol.fleet import Fleet
from rollout_service.protocol.progress import ProgressAsk, ProgressReply
from rollout_service.protocol.rollout import Completion, Rollout
from rollout_service.protocol.sampling import GenerateCall, Sampling
from tests.support.virtual_time import run_in_virtual_time
from tests.unit.fleet.completions import completion_of

TURN_TOKENS, TOOL_TOKENS, TURNS = 40, 160, 12
LAST_TOKENS = (TURN_TOKENS + TOOL_TOKENS) * TURNS
PREFILL_TOKENS_PER_S, STEP_S = 4000, 0.02


class Engine:
    """Generates for dispatchers; its cache holds ``capacity`` tokens. ``admits``: False to take every call."""

    def __init__(self, capacity: int, admits: bool = True) -> None:
        self._capacity, self._admits = capacity, admits
        time = asyncio.get_running_loop().time
        self.preemptions, self.prefill_tokens_per_s, self.decode_step_s = 0, PREFILL_TOKENS_PER_S, STEP_S
        self._sessions = SessionAdmission(capacity, self, time)
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._running = 0
        self._changed, self._prefill = asyncio.Condition(), asyncio.Lock()
        self.computed = 0
        """Number of tokens that were prefilled."""
        self.refusals: Counter[str | None] = Counter()

    async def generate(self, call: GenerateCall) -> Rollout:
        try:
            with self._sessions.admit(call) if self._admits else nullcontext(SessionTurn()) as turn:
                made = await self._generate(call, turn)
                turn.end([made])
        except KVCacheFull as full:
            self.refusals[call.session_id] += 1
            raise KVCacheFull(full.message, {"replica_id": "r"}) from full
        prompt = call.prompt_token_ids
        return Rollout(request_id=call.request_id, prompt_token_ids=prompt, completions=(made,), replica_id="r")

    async def _generate(self, call: GenerateCall, turn: SessionTurn) -> Completion:
        prompt, tokens = len(call.prompt_token_ids), call.sampling.max_tokens or 0
        needed = prompt + tokens
        async with self._changed:
            await self._changed.wait_for(lambda: self._running + needed <= self._capacity)
            self._running += needed
        cached = self._idle.pop(call.session_id or "", 0)
        excess = sum(self._idle.values()) + self._running - self._capacity
        while excess > 0:
            oldest, held = self._idle.popitem(last=False)
            if held > excess:  # the end of a sequence is evicted first
                self._idle[oldest] = held - excess
                self._idle.move_to_end(oldest, last=False)
            excess -= held
        turn.note_cached(cached)
        async with self._prefill:
            self.computed += prompt - cached
            await asyncio.sleep((prompt - cached) / PREFILL_TOKENS_PER_S)
        await asyncio.sleep(tokens * STEP_S)
        async with self._changed:
            self._running -= needed
            self._changed.notify_all()
        if call.session_id is not None:
            self._idle[call.session_id] = needed
        return completion_of((1,) * tokens, end="length")

    async def progress(self, ask: ProgressAsk) -> ProgressReply:
        raise NotImplementedError


class Ingest:
    async def fleet(self) -> Fleet:
        raise NotImplementedError


@dataclass
class Outcome:
    """The figures of one run."""

    seconds: float = 0.0
    computed: int = 0
    refusals: Counter[str | None] = field(default_factory=Counter)
    waits: dict[str, float] = field(default_factory=dict)
    """Session → its longest wait for a turn, beyond decoding, in seconds."""
    ends: list[str] = field(default_factory=list)
    """Sessions in the order of their ends."""


async def run_sessions(
    sessions: int,
    capacity: int,
    *,
    admits: bool = True,
    named: bool = True,
    every_s: float = 0.0,
    gateways: int = 1,
    turns: int = TURNS,
    tool_s: float = 1.0,
) -> Outcome:
    """Run sessions that begin ``every_s`` seconds. ``named``: False for calls without session ids."""
    engine, outcome, rng = Engine(capacity, admits), Outcome(), random.Random(1)
    time = asyncio.get_running_loop().time
    dispatchers = [Dispatcher(engine, Ingest(), EngineConfig()) for _ in range(gateways)]

    async def run_session(number: int) -> None:
        name, prompt = f"{number}", TOOL_TOKENS
        tools = random.Random(number)
        await asyncio.sleep(number * every_s)
        for turn in range(turns):
            call = GenerateCall(
                request_id=f"{name}-{turn}",
                prompt_token_ids=(1,) * prompt,
                sampling=Sampling(max_tokens=TURN_TOKENS),
                session_id=name if named else None,
            )
            began = time()
            await rng.choice(dispatchers).complete(call)
            outcome.waits[name] = max(outcome.waits.get(name, 0.0), time() - began - TURN_TOKENS * STEP_S)
            prompt += TURN_TOKENS + TOOL_TOKENS
            await asyncio.sleep(tools.expovariate(1 / tool_s))
        outcome.ends.append(name)

    await asyncio.gather(*map(run_session, range(sessions)))
    outcome.seconds, outcome.computed, outcome.refusals = time(), engine.computed, engine.refusals
    return outcome


SHORT = 8 * LAST_TOKENS
"""A cache for 8 whole sessions."""
COMPUTED_ONCE = LAST_TOKENS - TURN_TOKENS
"""Tokens of a session that are prefilled if it finds all of its cache."""


@pytest.mark.parametrize(("tool_s", "ratio"), [(0.2, 1.8), (1.0, 1.5), (4.0, 0.99), (8.0, 0.99)])
def test_sessions_beyond_memory_gain_and_never_lose(tool_s, ratio):
    # computing the whole cache takes 4.8 s, and decoding a turn 0.8 s
    today = run_in_virtual_time(run_sessions(32, SHORT, admits=False, tool_s=tool_s))
    ours = run_in_virtual_time(run_sessions(32, SHORT, tool_s=tool_s))
    assert today.seconds / ours.seconds > ratio
    assert ours.computed <= today.computed


def test_admitted_sessions_find_most_of_their_cache():
    today = run_in_virtual_time(run_sessions(32, SHORT, admits=False))
    ours = run_in_virtual_time(run_sessions(32, SHORT))
    assert today.computed > 5 * 32 * COMPUTED_ONCE
    assert ours.computed < 2 * 32 * COMPUTED_ONCE


def test_oldest_sessions_go_on_and_the_others_wait_for_them():
    ours = run_in_virtual_time(run_sessions(32, SHORT))
    assert not any(ours.refusals[str(number)] for number in range(7))
    assert max(ours.ends.index(str(number)) for number in range(7)) < 12
    assert sum(ours.refusals[str(number)] for number in range(16, 32)) > sum(ours.refusals.values()) / 2


def test_no_session_starves_while_others_keep_coming():
    alone = run_in_virtual_time(run_sessions(1, SHORT)).seconds
    ours = run_in_virtual_time(run_sessions(150, SHORT, every_s=alone / 12))
    assert len(ours.ends) == 150 and sum(ours.refusals.values()) > 150
    assert max(abs(int(name) - place) for place, name in enumerate(ours.ends)) < 32  # they end as they began


def test_two_gateways_starve_no_session():
    ours = run_in_virtual_time(run_sessions(32, SHORT, gateways=2))
    assert len(ours.ends) == 32 and not any(ours.refusals[str(number)] for number in range(7))


def test_enough_memory_changes_nothing():
    today = run_in_virtual_time(run_sessions(16, 16 * LAST_TOKENS, admits=False))
    ours = run_in_virtual_time(run_sessions(16, 16 * LAST_TOKENS))
    assert not ours.refusals
    assert (ours.seconds, ours.computed, ours.ends) == (today.seconds, today.computed, today.ends)


@pytest.mark.parametrize("turns", [1, TURNS])
def test_other_rollouts_run_as_without_admission(turns):
    named = turns == 1  # trainers may name rollouts of one turn
    today = run_in_virtual_time(run_sessions(64, SHORT // 8, admits=False, turns=turns, named=named))
    ours = run_in_virtual_time(run_sessions(64, SHORT // 8, turns=turns, named=named))
    assert (ours.seconds, ours.ends) == (today.seconds, today.ends) and not ours.refusals
