"""What a chat costs: ``/v1/chat/completions`` against ``/inference/v1/generate`` for the same token ids.

    python -m benchmarks.rollout.chat

One running service on the CPU, and many small requests at once. The sides take turns, another one first each round:

- ``native``: token ids in, token ids and logprobs out, as ``RolloutClient`` asks for them;
- ``chat``: a message in, text out: the chat template, the tokenizer and vLLM's server classes come on top;
- ``session``: the same chat with ``X-Session-ID`` of an open session, which keeps its tokens.

One HTTP client sends the bodies of all sides and reads their replies as JSON. Each request has a salt of the prefix
cache of its own, so that none finds what another has computed. A first round is not noted. What counts are the ratios
within a round; the machine's load before and after stands in the result.
"""

import asyncio
import random
import statistics
import string
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.paths import CPU_DEPLOYMENT
from benchmarks.common.results import Json
from benchmarks.rollout.machine_watch import cpu_seconds
from rollout_service.client import RolloutClient
from rollout_service.local import running_service

MODEL = "tiny-qwen3"
CHAT, NATIVE = "/v1/chat/completions", "/inference/v1/generate"


class ChatOptions(Options):
    """The chats."""

    concurrency: int = 64
    """Requests at once; each is the beginning of another conversation."""
    requests: int = 256
    """Of each side in each round."""
    prompt_chars: int = 64
    """Of a conversation's only message."""
    out: int = 32
    """Tokens of a reply."""


@dataclass(frozen=True)
class Conversation:
    """The beginning of a chat."""

    messages: list[Json]
    token_ids: list[int]
    """What the chat template makes of it."""
    session_id: str


Ask = Callable[[Conversation, str], Awaitable[int]]
"""One request of a side: the conversation, and the salt of the prefix cache. How many tokens were sampled."""


@dataclass(frozen=True)
class Sample:
    """One side in one round."""

    requests_per_s: float
    tokens_per_s: float
    cpu_ms: dict[str, float]
    """Milliseconds of CPU that each kind of process spent on a request."""


@dataclass
class Case:
    """One side."""

    side: str
    samples: list[Sample] = field(default_factory=list)

    def as_json(self, native: "Case") -> Json:
        """With medians, also of the ratios to ``native`` in the same round."""
        pairs = list(zip(self.samples, native.samples, strict=True))
        kinds = {kind for sample in self.samples for kind in sample.cpu_ms}
        median = statistics.median
        return asdict(self) | {
            "requests_per_s": median(sample.requests_per_s for sample in self.samples),
            "tokens_per_s": median(sample.tokens_per_s for sample in self.samples),
            "cpu_ms": {kind: median(s.cpu_ms.get(kind, 0.0) for s in self.samples) for kind in sorted(kinds)},
            "requests_to_native": median(mine.requests_per_s / its.requests_per_s for mine, its in pairs),
            "tokens_to_native": median(mine.tokens_per_s / its.tokens_per_s for mine, its in pairs),
        }


class Sides:
    """What each side sends. Raises RuntimeError for an error, or a reply of another length than was asked for."""

    def __init__(self, http: httpx.AsyncClient, out: int) -> None:
        self._http, self._out = http, out

    def all(self) -> dict[str, Ask]:
        """By name."""
        return {"native": self.native, "chat": self.chat, "session": self.session}

    async def native(self, conversation: Conversation, salt: str) -> int:
        """Token ids."""
        body = {
            "token_ids": conversation.token_ids,
            "sampling_params": {"max_tokens": self._out, "ignore_eos": True, "logprobs": 0},
            "flat_logprobs": True,
            "cache_salt": salt,
        }
        reply = await self._post(NATIVE, body)
        return self._whole(NATIVE, len(reply["choices"][0]["token_ids"]))

    async def chat(self, conversation: Conversation, salt: str) -> int:
        """Messages."""
        return await self._chat(conversation, salt, {})

    async def session(self, conversation: Conversation, salt: str) -> int:
        """Messages of a session."""
        return await self._chat(conversation, salt, {"X-Session-ID": conversation.session_id})

    async def prompt_of(self, messages: list[Json]) -> list[int]:
        """The token ids that a chat begins with."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "return_token_ids": True}
        return list((await self._post(CHAT, body))["prompt_token_ids"])

    async def _chat(self, conversation: Conversation, salt: str, headers: dict[str, str]) -> int:
        sampling = {"max_tokens": self._out, "ignore_eos": True, "cache_salt": salt}
        reply = await self._post(CHAT, {"model": MODEL, "messages": conversation.messages} | sampling, headers)
        if reply["usage"]["prompt_tokens"] != len(conversation.token_ids):
            raise RuntimeError(f"{CHAT}: a prompt of {reply['usage']['prompt_tokens']} tokens, not as on {NATIVE}")
        return self._whole(CHAT, reply["usage"]["completion_tokens"])

    def _whole(self, path: str, tokens: int) -> int:
        if tokens != self._out:
            raise RuntimeError(f"{path}: {tokens} tokens, not {self._out}")
        return tokens

    async def _post(self, path: str, body: Json, headers: dict[str, str] | None = None) -> Any:
        reply = await self._http.post(path, json=body, headers=headers)
        if reply.status_code != 200:
            raise RuntimeError(f"{path}: {reply.status_code}: {reply.text[:500]}")
        return reply.json()


async def take_turns(
    conversations: Sequence[Conversation], requests: int, rounds: int, sides: Mapping[str, Ask]
) -> list[Case]:
    """All sides in each round, another one first; one round before is not noted."""
    cases, names = {name: Case(name) for name in sides}, list(sides)
    for number in range(-1, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            sample = await _sample(conversations, requests, sides[name], f"{name} {number}")
            if number >= 0:
                cases[name].samples.append(sample)
    return list(cases.values())


async def _sample(conversations: Sequence[Conversation], requests: int, ask: Ask, turn: str) -> Sample:
    """Each conversation has one request under way until all have been sent."""
    numbers, tokens = iter(range(requests)), 0

    async def one_after_another(conversation: Conversation) -> None:
        nonlocal tokens
        for number in numbers:
            sampled = await ask(conversation, f"{turn} {number}")  # += would add to what there was before the wait
            tokens += sampled

    before, started = cpu_seconds(), time.perf_counter()
    await asyncio.gather(*(one_after_another(conversation) for conversation in conversations))
    seconds = time.perf_counter() - started
    spent = cpu_seconds() - before
    return Sample(requests / seconds, tokens / seconds, {kind: 1e3 * s / requests for kind, s in spent.items()})


async def measure(url: str, options: ChatOptions, rounds: int) -> list[Case]:
    """All sides of a running service."""
    letters = random.Random(0)
    limits = httpx.Limits(max_connections=options.concurrency)
    async with (
        httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http,
        RolloutClient(url) as client,
        AsyncExitStack() as sessions,
    ):
        sides, conversations = Sides(http, options.out), []
        for _ in range(options.concurrency):
            text = "".join(letters.choices(string.ascii_letters + " ", k=options.prompt_chars))
            messages: list[Json] = [{"role": "user", "content": text}]
            session = await sessions.enter_async_context(client.session())
            conversations.append(Conversation(messages, await sides.prompt_of(messages), session.session_id))
        return await take_turns(conversations, options.requests, rounds, sides.all())


def main(options: ChatOptions, rounds: int = 6) -> None:
    """Measure, print a table, write benchmarks/results/<machine>/rollout_chat.json."""
    load = {"before": psutil.getloadavg()}
    with tempfile.TemporaryDirectory() as folder:
        overrides = {"weights": {"root": folder + "/log"}, "model": {"path": f"{folder}/{MODEL}"}}
        with running_service(CPU_DEPLOYMENT, overrides) as service:
            cases = asyncio.run(measure(service.url, options, rounds))
    load["after"] = psutil.getloadavg()
    found = [case.as_json(cases[0]) for case in cases]
    content = {"work": options.model_dump(), "rounds": rounds, "load_average": load, "cases": found}
    path = results.write("rollout_chat", content)
    console = Console()
    console.print(table_of(found))
    console.print(
        f"load of the last minute: {load['before'][0]:.1f} before, {load['after'][0]:.1f} after; wrote {path}"
    )


def table_of(cases: Sequence[Json]) -> Table:
    """For people."""
    columns = ("median", "requests/s", "tokens/s", "to native", "gateway, CPU ms a request")
    table = Table(*columns, title=f"Small chats on {results.machine()}")
    for case in cases:
        table.add_row(
            case["side"],
            f"{case['requests_per_s']:.1f}",
            f"{case['tokens_per_s']:.0f}",
            f"{case['requests_to_native']:.2f}",
            f"{case['cpu_ms']['gateway']:.1f}",
        )
    return table


if __name__ == "__main__":
    run(main)
