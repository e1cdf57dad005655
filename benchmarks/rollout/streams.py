"""How much work is lost when a replica is killed under long rollouts, and whether what is joined is right.

    python -m benchmarks.rollout.streams [--kills 5] [--seed 0]

Two replicas of the small model, whose every token tells the version that made it (``tests/support/telltale.py``). In
each round ``--at-once`` rollouts of ``--out`` tokens begin together, and as many are streamed; at a random moment one
replica is killed with its engine (SIGKILL), and a version is pushed. A rollout that the replica had kept as many tokens
as its first span has. When that many had been made is read from the streams of the same replica, which began at the
same moment: the difference to the kill is the work that it lost, in seconds. What a stream says is late by up to
``LIVE_PERIOD_S``, which is added. A replica that is asked every ``PERIOD_S`` should lose half of it on average.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.paths import CPU_DEPLOYMENT
from rollout_service.client import RolloutClient
from rollout_service.engine.progress_reports import LIVE_PERIOD_S
from rollout_service.errors import RolloutServiceError
from rollout_service.local import LocalService, running_service
from rollout_service.protocol.rollout import Completion, Rollout
from tests.support.processes import descendants
from tests.support.telltale import assert_pure, canary_weights

REPLICA = "ray::ServeReplica:rollout:engine"
PROMPT = [5, 6, 7, 8]


class LoadOptions(Options):
    """The rounds."""

    kills: int = 5
    """Rounds, with a kill in each."""
    at_once: int = 8
    """Rollouts of a round; as many more are streamed."""
    out: int = 600
    """Tokens of a rollout."""
    seed: int = 0
    """Of the moments."""


@dataclass
class Watched:
    """A streamed rollout, and when so many of its tokens had come."""

    rollout: Rollout | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, tokens so far)."""

    def had(self, tokens: int) -> float:
        """When so many had been made, between two arrivals as if at one speed."""
        before = (self.arrivals[0][0], 0)
        for at, count in self.arrivals:
            if count >= tokens:
                share = (tokens - before[1]) / max(1, count - before[1])
                return before[0] + share * (at - before[0])
            before = (at, count)
        return before[0]


@dataclass
class Found:
    """What became of the rollouts of a round."""

    rollouts: int = 0
    lost_s: list[float] = field(default_factory=list)
    """Of each rollout that has tokens of the killed replica and of another."""
    lost_tokens: list[float] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


async def watch(client: RolloutClient, out: int, watched: Watched) -> Rollout:
    """Read a rollout along."""
    async with client.generate_stream(PROMPT, max_tokens=out, temperature=0.0, ignore_eos=True) as stream:
        async for piece in stream:
            so_far = watched.arrivals[-1][1] if watched.arrivals else 0
            watched.arrivals.append((time.monotonic(), so_far + len(piece.token_ids)))
    watched.rollout = stream.rollout
    return stream.rollout


async def one_kill(service: LocalService, client: RolloutClient, options: LoadOptions) -> Found:
    """A round."""
    found = Found()
    while len((await client.fleet()).replicas) != 2 or any(r.state != "ready" for r in (await client.fleet()).replicas):
        await asyncio.sleep(0.5)
    watched = [Watched() for _ in range(options.at_once)]
    plain = [
        asyncio.create_task(client.generate(PROMPT, max_tokens=options.out, temperature=0.0, ignore_eos=True))
        for _ in range(options.at_once)
    ]
    streams = [asyncio.create_task(watch(client, options.out, each)) for each in watched]
    while not all(each.arrivals for each in watched):
        await asyncio.sleep(0.05)
    await asyncio.sleep(random.uniform(0.5, 6.0))
    victim = random.choice(descendants(REPLICA))
    doomed = [*victim.children(recursive=True), victim]
    killed_at = time.monotonic()
    for process in doomed:
        process.kill()
    version = (await client.fleet()).latest_version + 1
    await client.push_weights(version, canary_weights(service.config.model.path, version), wait="none")
    done = await asyncio.gather(*plain, *streams, return_exceptions=True)
    for outcome in done:
        if isinstance(outcome, RolloutServiceError):
            found.failed.append(str(outcome))
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            _look_at(outcome.completions[0], options.out, found)
    _count_lost([o for o in done if isinstance(o, Rollout)], watched, killed_at, found)
    return found


def _look_at(completion: Completion, out: int, found: Found) -> None:
    found.rollouts += 1
    if len(completion.token_ids) != out:
        found.failed.append(f"{len(completion.token_ids)} of {out} tokens, {completion.finish_reason}")
    try:
        assert_pure(completion)
    except AssertionError as error:
        found.stale.append(str(error))


def _count_lost(done: list[Rollout], watched: list[Watched], killed_at: float, found: Found) -> None:
    """What the rollouts of the killed replica lost: those whose tokens are of two."""
    clocks = {w.rollout.completions[0].spans[0].replica_id: w for w in watched if w.rollout and w.rollout.attempts > 1}
    for rollout in done:
        [completion] = rollout.completions
        first = completion.spans[0].replica_id
        clock = clocks.get(first)
        if rollout.attempts == 1 or clock is None:
            continue
        kept = max(span.end for span in completion.spans if span.replica_id == first)
        lost_s = max(0.0, killed_at - clock.had(kept)) + LIVE_PERIOD_S
        (begin, _), (end, made) = clock.arrivals[0], max(a for a in clock.arrivals if a[0] <= killed_at)
        found.lost_s.append(lost_s)
        found.lost_tokens.append(lost_s * made / max(1e-9, end - begin))


async def measure(service: LocalService, options: LoadOptions) -> AsyncGenerator[Found]:
    """Each round, on one service."""
    async with RolloutClient(service.url, retries=12) as client:
        await client.push_weights(1, canary_weights(service.config.model.path, 1))
        for _ in range(options.kills):
            yield await one_kill(service, client, options)


def overrides_in(folder: str, options: LoadOptions) -> dict[str, dict[str, object]]:
    """Of the shipped CPU deployment."""
    return {
        "weights": {"root": folder + "/log", "keep_versions": 8},
        "model": {"path": folder + "/tiny-qwen3"},
        "scaling": {"min_replicas": 2, "max_replicas": 2},
        "engine": {"max_model_len": max(1024, options.out + 64)},
    }


async def rounds(service: LocalService, options: LoadOptions) -> None:
    """Measure, and write after each round what there is."""
    async for found in measure(service, options):
        lost = ", ".join(f"{each:.2f}" for each in found.lost_s)
        print(f"{found.rollouts} rollouts, {len(found.lost_s)} of them went on, having lost {lost} s", flush=True)
        path = write(found)
    print(f"wrote {path}")


def write(found: Found) -> Path:
    """Add a round to the result."""
    file = results.path("streams")
    earlier = json.loads(file.read_text())["rounds"] if file.exists() else []
    every = [*earlier, asdict(found) | {"date": results.today(), "command": results.command()}]
    lost = [each for one in every for each in one["lost_s"]]
    content = {
        "kills": len(every),
        "rollouts": sum(one["rollouts"] for one in every),
        "rollouts_that_went_on": len(lost),
        "tokens_lost_max_s": round(max(lost, default=0.0), 3),
        "tokens_lost_median_s": round(statistics.median(lost), 3) if lost else None,
        "tokens_lost_max": round(max((each for one in every for each in one["lost_tokens"]), default=0.0), 1),
        "stale_tokens": sum(len(one["stale"]) for one in every),
        "lost_requests": sum(len(one["failed"]) for one in every),
        "rounds": every,
    }
    return results.write("streams", content)


def main(options: LoadOptions) -> None:
    """Measure; adds its rounds to benchmarks/results/<machine>/streams.json."""
    random.seed(options.seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(CPU_DEPLOYMENT, overrides_in(folder, options)) as service,
    ):
        asyncio.run(rounds(service, options))


if __name__ == "__main__":
    run(main)
