"""Tokens/s and waits of agents' sessions that exceed the KV cache, with and without admission by session.

    python -m benchmarks.rollout.sessions            # Qwen3-8B on a GPU: 64 sessions of 33 turns to 40 k tokens
    python -m benchmarks.rollout.sessions --turns 12 --tokens 14400    # a third of the work, and of the cache
    python -m benchmarks.rollout.sessions --small    # the tiny model on the CPU

Both sides send the same calls to one replica. Only the side ``sessions`` sends session ids, without which a replica
admits all calls. The same weights are pushed every ``--update-s`` seconds. The wait of a turn lasts from its request to
its first token. Random weights, no end of sequence, and tools that take exponential times.
"""

import asyncio
import random
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.shipped_service import ServedOptions, shipped_service
from rollout_service.client import RolloutClient
from rollout_service.client._generate import GenerateOptions

RESULT = "rollout_sessions"
SAME = ("model", "side", "kv_cache", "work")
BLOCK = 64  # number of tokens in a page of the KV cache
TOKEN_IDS = range(5, 100)  # token ids that every model here has


class Side(StrEnum):
    """What is compared."""

    CALLS = "calls"  # calls without session ids: vLLM alone decides
    SESSIONS = "sessions"  # the same calls with session ids


class AgentOptions(ServedOptions):
    """The service and its agents."""

    small: bool = False
    """The tiny model on the CPU, with a small run's numbers in place of all below."""
    side: tuple[Side, ...] = tuple(Side)
    """May be repeated. The figures of a side are written when it has ended."""
    kv_cache: Literal["drop", "keep"] = "drop"
    """weights.kv_cache_on_update."""
    sessions: int = 64
    """Number of sessions, which all begin at once."""
    turns: int = 33
    """Number of turns of a session."""
    tokens: int = 40_000
    """Tokens of a session after its last turn."""
    turn_tokens: int = 400
    """Tokens that the model makes in a turn; the tool adds the rest."""
    tool_s: float = 1.0
    """Mean time in seconds that a tool takes."""
    memory: float = 4.0
    """Tokens of all sessions as a multiple of the KV cache's."""
    update_s: float = 30.0
    """Time in seconds from one push to the next; 0: none."""

    @property
    def tool_tokens(self) -> int:
        """Tokens that a tool adds, before the first turn and after each."""
        return self.tokens // self.turns - self.turn_tokens

    def engine(self) -> dict[str, Any]:
        """Return the engine's settings."""
        return {
            "max_model_len": -(-(self.tokens + BLOCK) // BLOCK) * BLOCK,
            "max_num_seqs": self.sessions,
            "block_size": BLOCK,
            "extra": {"num_gpu_blocks_override": int(self.sessions * self.tokens / self.memory) // BLOCK},
        }

    def work(self) -> dict[str, Any]:
        return self.model_dump(include={*SMALL, "memory"})


SMALL = {"sessions": 16, "turns": 16, "tokens": 3840, "turn_tokens": 16, "tool_s": 0.2, "update_s": 30.0}
"""Options of a run on the CPU, with the tiny model."""


@dataclass
class Case:
    """What one side did."""

    model: str
    side: str
    kv_cache: str
    work: dict[str, Any]
    kv_tokens: int = 0  # tokens that the KV cache holds
    seconds: float = 0.0
    tokens: int = 0  # tokens that the model made
    updates: int = 0
    waits: list[float] = field(default_factory=list)  # seconds from a turn's request to its first token
    session_s: list[float] = field(default_factory=list)  # duration of each session, in seconds

    def as_json(self) -> dict[str, Any]:
        """Return the figures, without the wait of each turn."""
        waits = sorted(self.waits)
        figures = {
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "wait_p50_s": round(waits[len(waits) // 2], 3),
            "wait_p99_s": round(waits[int(0.99 * len(waits))], 3),
            "wait_max_s": round(waits[-1], 3),
        }
        return figures | {name: value for name, value in asdict(self).items() if name != "waits"}


async def run_session(client: RolloutClient, number: int, work: AgentOptions, case: Case) -> None:
    """Run one session to its end."""
    rng, began = random.Random(number), time.monotonic()
    session_id = f"agent-{number}" if case.side == Side.SESSIONS else None
    sampling: GenerateOptions = {"max_tokens": work.turn_tokens, "ignore_eos": True, "session_id": session_id}
    prompt = [rng.choice(TOKEN_IDS) for _ in range(work.tool_tokens)]
    # a side must not find the other one's prompts in the cache
    prompt[0] = TOKEN_IDS[list(Side).index(Side(case.side))]
    for _ in range(work.turns):
        asked, first = time.monotonic(), None
        async with client.generate_stream(prompt, **sampling) as stream:
            async for _piece in stream:
                first = first or time.monotonic()
        assert first is not None, "a turn of at least one token"
        case.waits.append(first - asked)
        [completion] = stream.rollout.completions
        case.tokens += len(completion.token_ids)
        prompt += [*completion.token_ids, *(rng.choice(TOKEN_IDS) for _ in range(work.tool_tokens))]
        await asyncio.sleep(rng.expovariate(1 / work.tool_s))
    case.session_s.append(round(time.monotonic() - began, 2))


async def push_periodically(client: RolloutClient, weights: Path, period_s: float, case: Case) -> None:
    """Push the same weights as new versions, until cancelled."""
    while period_s:
        await asyncio.sleep(period_s)
        await client.push_path("next", weights)
        case.updates += 1


async def measure(url: str, work: AgentOptions, model: Path) -> None:
    """Run the sides one after the other, and write each to benchmarks/results/<machine>/rollout_sessions.json."""
    async with RolloutClient(url, retries=12) as client:
        load = (await client.fleet()).replicas[0].load
        for side in work.side:
            case = Case(work.model, side, work.kv_cache, work.work(), load.kv_cache_tokens if load else 0)
            pushing = asyncio.create_task(push_periodically(client, model, work.update_s, case))
            began = time.monotonic()
            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(work.sessions):
                        group.create_task(run_session(client, number, work, case))
            finally:
                pushing.cancel()
                await asyncio.gather(pushing, return_exceptions=True)
            case.seconds = round(time.monotonic() - began, 2)
            results.add(RESULT, [case.as_json()], SAME)


def main(asked: AgentOptions) -> None:
    """Start the service, and measure."""
    work = asked.model_copy(update=SMALL | {"model": "tiny"}) if asked.small else asked
    model = work.model_folder()
    weights = {"kv_cache_on_update": work.kv_cache, "source_roots": [str(model)]}
    with shipped_service(work, "1", engine=work.engine(), weights=weights) as (url, _):
        asyncio.run(measure(url, work, model))


if __name__ == "__main__":
    run(main)
