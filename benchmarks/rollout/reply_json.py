"""What the JSON of a large reply costs gateway and client: an object a token, as vLLM's form has it, and flat lists.

    python -m benchmarks.rollout.reply_json

One request of ``--n`` completions of ``--tokens`` tokens goes through the gateway's real route in this process, with
an engine that has the answer ready; its reply is then read by our client's own function. *Gateway* is the whole request
but for the engine and the sockets: reading and checking it, making the reply, writing it. The client only ever asks for
flat lists; for the other form a pydantic model of it is read here. One core, medians.
"""

import asyncio
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import httpx
import torch
from pydantic import BaseModel, FiniteFloat, TypeAdapter
from rich.console import Console
from rich.table import Table

from benchmarks.common import results
from benchmarks.common.command import Options, run
from benchmarks.common.timing import wall_seconds
from rollout_service.client._generate import body_of, request_of, rollout_of
from rollout_service.config import MonitorConfig
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from rollout_service.monitor.feed import RolloutFeed
from rollout_service.protocol.rollout import Completion, Rollout, Span
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.runtime.rpc import IngestCalls, MonitorCalls
from rollout_service.web.auth import Authorizer

VOCABULARY, PROMPT_TOKENS = 151_936, 512
ROUTE = "/inference/v1/generate"


class _Token(BaseModel):
    token_id: int
    logprob: FiniteFloat


class _Logprobs(BaseModel):
    content: list[_Token]


class _Choice(BaseModel):
    index: int
    token_ids: tuple[int, ...]
    logprobs: _Logprobs
    finish_reason: str
    weight_versions: tuple[Span, ...]


class ByToken(BaseModel):
    """A reply in vLLM's form."""

    request_id: str
    choices: list[_Choice]


class ReadyEngine:
    """In the dispatcher's place: always the same completions."""

    def __init__(self, n: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, VOCABULARY, (n, tokens), generator=generator).tolist()
        logprobs = (-torch.rand((n, tokens), generator=generator) * 8).tolist()
        spans = (Span(version=7, start=0, end=tokens),)
        self._completions = tuple(
            Completion(index=i, token_ids=tuple(t), logprobs=tuple(lp), finish_reason="length", spans=spans)
            for i, (t, lp) in enumerate(zip(ids, logprobs, strict=True))
        )

    async def complete(self, call: GenerateCall, on_abort: str, live: None = None) -> Rollout:
        """See ``Dispatcher.complete``."""
        return Rollout(
            request_id=call.request_id,
            prompt_token_ids=call.prompt_token_ids,
            completions=self._completions,
            replica_id="engine#1",
        )


def services(engine: ReadyEngine) -> Services:
    """What the route stands on, with nobody behind it."""
    monitor = cast(MonitorCalls, None)
    return Services(
        name="model",
        vocab_size=VOCABULARY,
        max_model_len=32_768,
        tokenizer=None,
        dispatcher=cast(Dispatcher, engine),
        ingest=cast(IngestCalls, None),
        authorizer=Authorizer(None),
        http=httpx.AsyncClient(),
        monitor=monitor,
        feed=RolloutFeed(monitor, MonitorConfig(remember_tokens=0).remember_tokens),
    )


async def posted(app: Any, body: bytes) -> bytes:
    """The reply's body. Raises RuntimeError if it is an error."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": ROUTE}
    await app({**scope, "raw_path": ROUTE.encode(), "query_string": b"", "headers": headers}, receive, send)
    reply = b"".join(message.get("body", b"") for message in sent)
    if sent[0]["status"] != 200:
        raise RuntimeError(f"{sent[0]['status']}: {reply[:200]!r}")
    return reply


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Of one call, after three that are not counted."""
    return 1e3 * statistics.median(wall_seconds(work, repeats, warm_up=3))


class ReplyOptions(Options):
    """The reply."""

    n: int = 16
    """Completions."""
    tokens: int = 512
    """Of each completion."""
    repeats: int = 50
    """Of each measurement."""


@dataclass(frozen=True)
class Case:
    """One form of the same reply."""

    form: str
    bytes: int
    gateway_ms: float
    client_ms: float


def measure(options: ReplyOptions) -> Iterator[Case]:
    """Both forms."""
    asked = request_of(list(range(PROMPT_TOKENS)), Sampling(n=options.n, max_tokens=options.tokens, ignore_eos=True))
    flat = body_of(asked)
    by_token = {name: value for name, value in flat.items() if name != "flat_logprobs"}
    app = create_app(services(ReadyEngine(options.n, options.tokens)))

    def read_by_token(reply: bytes) -> object:
        return TypeAdapter(ByToken).validate_json(reply)

    def read_flat(reply: bytes) -> object:
        request = httpx.Request("POST", f"http://service{ROUTE}")
        return rollout_of(httpx.Response(200, content=reply, request=request), asked)

    with asyncio.Runner() as runner:
        forms = (("object a token", by_token, read_by_token), ("flat_logprobs", flat, read_flat))
        for form, body, read in forms:
            request = json.dumps(body).encode()
            reply = runner.run(posted(app, request))
            gateway_ms = median_ms(partial(_post, runner, app, request), options.repeats)
            yield Case(form, len(reply), gateway_ms, median_ms(partial(read, reply), options.repeats))


def _post(runner: asyncio.Runner, app: Any, request: bytes) -> bytes:
    return runner.run(posted(app, request))


def main(options: ReplyOptions) -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/rollout/reply_json.json."""
    cases = list(measure(options))
    table = Table(title=f"a reply of {options.n} × {options.tokens} tokens on one core of {results.machine()}")
    for column in ("form", "kB", "gateway, ms", "client, ms"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for case in cases:
        table.add_row(case.form, f"{case.bytes / 1e3:.0f}", f"{case.gateway_ms:.1f}", f"{case.client_ms:.1f}")
    console = Console()
    console.print(table)
    content = options.model_dump() | {"cases": [asdict(case) for case in cases]}
    console.print(f"wrote {results.write('rollout_reply_json', content)}")


if __name__ == "__main__":
    run(main)
