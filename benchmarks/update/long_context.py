"""What an update costs streams with long contexts, where the KV cache is dropped and where it is kept.

    python -m benchmarks.update.long_context [--model qwen3-8b] [--policy drop] [--policy keep]
    python -m benchmarks.update.long_context --model tiny --sessions 4 --prompt 256 --out 1500   # on a CPU

One replica, random weights. ``--sessions`` streams of distinct prompts decode; then a version is committed by ``path``.
Tokens are counted as they arrive. *Before* is the rate in the 10 seconds before the push, *after* the rate in
as many seconds from when the engine closed. A *silence* is the longest time between two arrivals of a stream from the
push on.
"""

import asyncio
import itertools
import tempfile
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.paths import SHARED_MEMORY
from benchmarks.common.shipped_service import ServedOptions, shipped_service
from rollout_service.client import RolloutClient

RESULT = "update_long_context"
SAME = ("model", "policy", "sessions", "prompt_tokens")


class Policy(StrEnum):
    """``weights.kv_cache_on_update``."""

    DROP = "drop"
    KEEP = "keep"


class ContextOptions(ServedOptions):
    """The service and its streams."""

    policy: tuple[Policy, ...] = tuple(Policy)
    """May be repeated."""
    sessions: int = 20
    """Streams at once."""
    prompt: int = 16384
    """Tokens of each prompt."""
    out: int = 4000
    """Tokens of each completion; it must last for both windows."""


@dataclass
class Case:
    """One policy with one model."""

    model: str
    policy: str
    sessions: int
    prompt_tokens: int
    closed_s: float = 0.0  # in which the engine did not run, of the update
    before: float = 0.0  # tokens per second of all streams
    after: float = 0.0
    silences_s: list[float] = field(default_factory=list)
    """Of each stream, the longest from the push on; in ascending order."""
    kept: int = 0  # streams with tokens that read keys and values of an older version
    window_s: float = 10.0  # seconds over which tokens are counted before and after the update


Arrivals = list[tuple[float, int]]  # of one stream: second and number of tokens of each piece


async def stream(client: RolloutClient, prompt: list[int], out: int, arrivals: Arrivals) -> bool:
    """Generate, and note arrivals. Returns True if tokens read older keys and values."""
    async with client.generate_stream(prompt, max_tokens=out, ignore_eos=True) as pieces:
        async for piece in pieces:
            arrivals.append((time.monotonic(), len(piece.token_ids)))
        [completion] = pieces.rollout.completions
    return any(span.kv_from is not None for span in completion.spans)


async def measure(url: str, folder: Path, case: Case, prompts: list[list[int]], out: int) -> None:
    """Measure one update of a running service. Versions 1 and 2 teach it the load plan."""
    async with RolloutClient(url) as client:
        for version in (1, 2):
            await client.push_path(version, folder)
        arrivals: list[Arrivals] = [[] for _ in prompts]
        streams = [
            asyncio.create_task(stream(client, prompt, out, noted))
            for prompt, noted in zip(prompts, arrivals, strict=True)
        ]
        while not all(arrivals):
            await asyncio.sleep(0.1)
            for done in streams:
                if done.done():
                    raise RuntimeError("a stream ended before all had begun: raise --out")
        await asyncio.sleep(case.window_s)
        begin = time.monotonic()
        await client.push_path(3, folder)
        served = time.monotonic()
        [replica] = (await client.fleet()).replicas
        if replica.update is None or replica.version != 3:
            raise RuntimeError(f"the replica serves {replica.version}, not version 3")
        case.closed_s = replica.update.closed_s
        kept = await asyncio.gather(*streams)
    show(case, arrivals, begin, served - case.closed_s)
    case.kept = sum(kept)


def show(case: Case, arrivals: list[Arrivals], begin: float, closed_at: float) -> None:
    """Compute a case's figures. ``begin``: of the push; ``closed_at``: when the engine closed."""
    last = min(pieces[-1][0] for pieces in arrivals)
    if last < closed_at + case.window_s:
        raise RuntimeError(f"a stream ended {last - closed_at:.1f} s after the engine closed: raise --out")
    tokens = sorted(piece for pieces in arrivals for piece in pieces)

    def rate(start: float) -> float:
        return sum(count for at, count in tokens if start <= at < start + case.window_s) / case.window_s

    case.before, case.after = rate(begin - case.window_s), rate(closed_at)
    for pieces in arrivals:
        times = [at for at, _ in pieces]
        case.silences_s.append(max(b - a for a, b in itertools.pairwise(times) if b > begin))
    case.silences_s.sort()


def main(asked: ContextOptions) -> None:
    """Measure each policy, and add the cases to benchmarks/results/<machine>/update_long_context.json."""
    model, prompts = asked.model_folder(), asked.prompts(asked.sessions, asked.prompt)
    engine = {"max_model_len": asked.prompt + asked.out + 64, "max_num_seqs": asked.sessions}
    for policy in map(str, asked.policy):  # PyYAML writes no enumerations
        case = Case(asked.model, policy, asked.sessions, asked.prompt)
        weights: dict[str, Any] = {"kv_cache_on_update": policy, "source_roots": [str(model)]}
        if policy == Policy.KEEP:
            weights["kv_max_age"] = None
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as log:  # the shipped log has an earlier run's versions
            weights["root"] = log
            with shipped_service(asked, "1", engine=engine, weights=weights) as (url, _):
                asyncio.run(measure(url, model, case, prompts, asked.out))
        results.add(RESULT, [asdict(case)], SAME)


if __name__ == "__main__":
    run(main)
