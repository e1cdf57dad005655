"""Measure what packed scores cost the processes around an engine: a teacher's 256 sequences of 32k tokens, top 64.

    python -m benchmarks.rollout.scores

There is no engine. The replica's part packs lists as vLLM returns them, and pickles the reply. A gateway in a process
of its own unpickles a copy for each request and answers by HTTP. The client in this process unpacks the reply.
"""

import asyncio
import multiprocessing
import pickle
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import httpx
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput

from benchmarks.common import results
from benchmarks.common.command import Options, run
from rollout_service.client import RolloutClient
from rollout_service.config import MonitorConfig
from rollout_service.config.engine import EngineConfig
from rollout_service.engine.adapter import scores
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from rollout_service.monitor.monitor import Monitor
from rollout_service.protocol.rollout import Completion, Rollout, Span
from rollout_service.protocol.sampling import GenerateCall, Scoring
from rollout_service.web.auth import Authorizer
from tests.support.serving import App, serving

RESULT = "rollout_scores"
VOCABULARY = 151_936
TOP, REQUESTS = 64, 8
"""Top logprobs of each token, and sequences that are scored."""
SEQUENCES = 256
"""Sequences of a batch, for which the result is multiplied."""
BEAT_S = 0.001
"""Seconds between two looks at the gateway's event loop."""


class ScoreOptions(Options):
    """The sequences."""

    tokens: int = 32_768
    """Tokens of each."""
    at_once: int = 4
    """Requests of the client at a time."""


@dataclass
class StoredReply:
    """Stands for a replica: returns a copy of one pickled rollout."""

    pickled: bytes

    async def generate(self, call: GenerateCall) -> Rollout:
        """Return the rollout under the name of the call."""
        rollout: Rollout = pickle.loads(self.pickled)
        return rollout.model_copy(update={"request_id": call.request_id})


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and the seconds of CPU that it took."""
    started = time.process_time()
    made = function()
    return made, time.process_time() - started


def output_of(options: ScoreOptions, tokens: list[int]) -> RequestOutput:
    """Return what vLLM returns for a prompt with prompt logprobs."""
    width, rng = 1 + TOP, random.Random(0)
    flat = FlatLogprobs()
    flat.append(None)
    rows = options.tokens - 1
    flat.start_indices += range(0, rows * width, width)
    flat.end_indices += range(width, rows * width + 1, width)
    flat.token_ids += [rng.randrange(VOCABULARY) for _ in range(rows * width)]
    flat.logprobs += [-10 * rng.random() for _ in range(rows * width)]
    flat.ranks += list(range(width)) * rows
    return RequestOutput("scores", None, tokens, flat, [], finished=True)


async def watch(blocked: list[float]) -> None:
    """Append the CPU seconds of this thread between two looks, again and again."""
    while True:
        started = time.thread_time()
        await asyncio.sleep(BEAT_S)
        blocked.append(time.thread_time() - started)


def gateway(connection: Connection, pickled: bytes, options: ScoreOptions) -> None:
    """Serve until told to end; then send the seconds of CPU, the longest block and the peak memory."""

    engine: Any = StoredReply(pickled)  # no call is polled
    no_ingest: Any = None  # a score asks it nothing

    async def main() -> None:
        async with httpx.AsyncClient() as http:
            services = Services(
                name="teacher",
                vocab_size=VOCABULARY,
                max_model_len=options.tokens + 1,
                tokenizer=None,
                dispatcher=Dispatcher(engine, no_ingest, EngineConfig()),
                ingest=no_ingest,
                authorizer=Authorizer(None),
                http=http,
                monitor=Monitor(MonitorConfig()),
                max_logprobs=TOP,
            )
            async with serving(App(create_app(services))) as served:
                blocked: list[float] = []
                watching = asyncio.create_task(watch(blocked))
                started = time.process_time()
                connection.send(served.url)
                await asyncio.to_thread(connection.recv)
                watching.cancel()
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
                connection.send((time.process_time() - started, max(blocked), peak))

    asyncio.run(main())


async def score(url: str, tokens: list[int], options: ScoreOptions) -> None:
    """Score all sequences, a few at a time. Raises ValueError for a reply of another size."""
    places = asyncio.Semaphore(options.at_once)
    async with RolloutClient(url) as client:

        async def one() -> None:
            async with places:
                found = await client.score(tokens, top_logprobs=TOP)
            if len(found.logprobs) != (options.tokens - 1) * (TOP + 1):
                raise ValueError(f"a reply has {len(found.logprobs)} logprobs")

        await asyncio.gather(*(one() for _ in range(REQUESTS)))


def measure(options: ScoreOptions) -> results.Json:
    """Pack, serve and unpack; return the seconds of CPU for one sequence, which other programs hardly change.

    ``pack_s`` and ``pickle_s`` are the replica's. ``gateway_s`` holds unpickling, checks and HTTP; ``blocked_s`` is the
    longest time in which the gateway's event loop did nothing else. ``batch_gateway_s`` is for ``SEQUENCES``.
    """
    tokens = [3 + i % 1000 for i in range(options.tokens)]
    output = output_of(options, tokens)
    packed, pack_s = timed(lambda: scores(output, Scoring(start=1)))
    sampled = Completion(
        index=0, token_ids=(3,), logprobs=(-1.0,), finish_reason="length", spans=(Span(version=1, start=0, end=1),)
    ).model_copy(update={"scores": packed})
    rollout = Rollout(request_id="", prompt_token_ids=tuple(tokens), completions=(sampled,), replica_id="replica")
    pickled, pickle_s = timed(lambda: pickle.dumps(rollout, protocol=5))
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=gateway, args=(there, pickled, options))
    process.start()
    try:
        url = here.recv()
        _, client_s = timed(lambda: asyncio.run(score(url, tokens, options)))
        here.send(None)
        gateway_s, blocked_s, peak = here.recv()
    finally:
        process.join(10)
        process.kill()
    return {
        "tokens": options.tokens,
        "top": TOP,
        "requests": REQUESTS,
        "reply_bytes": len(packed.model_dump_json()),
        "pack_s": pack_s,
        "pickle_s": pickle_s,
        "gateway_s": gateway_s / REQUESTS,
        "blocked_s": blocked_s,
        "gateway_peak_bytes": peak,
        "client_s": client_s / REQUESTS,
        "sequences": SEQUENCES,
        "batch_gateway_s": SEQUENCES * gateway_s / REQUESTS,
    }


def main(options: ScoreOptions) -> None:
    """Measure, print, and write benchmarks/results/<machine>/rollout_scores.json."""
    case = measure(options)
    print(results.brief(case))
    results.write(RESULT, {"cases": [case]})


if __name__ == "__main__":
    run(main)
